"""A short notebook under other versions of IPython, ipykernel and Python: ``make compatibility``.

Each set gets an environment of its own, which takes torch and the rest from the one that runs
this. Not part of ``make test``: it needs the network. One line a set; the exit code says whether
all passed. Sets: those below, or those named on the command line.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "compatibility"
COMMON = ("ipyparallel>=9", "psutil", "nvidia-ml-py", "jupyter_client", "nbclient", "setuptools")
SETS = {
    "colab": ("ipython==7.34.0", "ipykernel<7"),
    "ipython-8.6": ("ipython==8.6.0", "ipykernel<7"),
    "ipython-8": ("ipython<9", "ipykernel>=7"),
    "ipykernel-6": ("ipython>=9", "ipykernel<7"),
    "newest": ("ipython", "ipykernel", "papermill"),
}


def environment(name: str) -> Path:
    """Return the interpreter of a set's environment, made if it is not there."""
    place = BUILD / name
    python = place / "bin" / "python"
    if not (place / "made").exists():
        venv.create(place, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *COMMON, *SETS[name]], check=True
        )
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        libraries = place / "lib" / version / "site-packages"
        # what is not there is taken from here: a path in a .pth file comes after its own
        lines = [sysconfig.get_path("purelib"), str(ROOT)]
        (libraries / "zz_others.pth").write_text("\n".join(lines))
        (place / "made").touch()
    return python


def main() -> int:
    """Run the notebook in each set, and say how it went."""
    failed = 0
    for name in sys.argv[1:] or SETS:
        script = Path(__file__).with_name("notebook.py")
        done = subprocess.run([environment(name), script], capture_output=True, text=True)
        print(f"{name}: {'passed' if done.returncode == 0 else 'FAILED'}: {done.stdout.strip()}")
        if done.returncode:
            failed += 1
            print(done.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
