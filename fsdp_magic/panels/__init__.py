"""Records to HTML and text, one file a panel; pure. The only HTML of the project."""
