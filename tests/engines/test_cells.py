def test_a(session):
    session.run("x = 1; rank = 7", show=False)
    assert session.run("'x' in globals()", show=False)[0].result == "True"

def test_b(session):
    assert session.run("'x' in globals(), rank", show=False)[1].result == "(False, 1)"
