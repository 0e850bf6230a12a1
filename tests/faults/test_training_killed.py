"""A training that is killed with kill -9 while it writes a checkpoint."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from eagle3_kit import small_trainer
torch.set_num_threads(1)
trainer = small_trainer(Path(sys.argv[2]), checkpoints="parts")
fsync = os.fsync
def die_at_the_second_checkpoint(handle):
    fsync(handle)
    if len(trainer.history) == 10:
        os.truncate(handle, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = die_at_the_second_checkpoint
trainer.fit()
"""


def test_training_killed_while_it_writes_a_checkpoint_goes_on_as_if_nothing_happened(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    import torch
    from eagle3_kit import small_trainer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = small_trainer(tmp_path, checkpoints="whole").fit()
    arguments = [sys.executable, "-c", KILLED_WHILE_WRITING, str(ROOT / "tests" / "unit"), str(tmp_path)]
    killed = subprocess.run(arguments, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [file.name for file in sorted((tmp_path / "parts").iterdir())] == [".step-00000010.tmp", "step-00000005.pt"]
    resumed = small_trainer(tmp_path, checkpoints="parts")
    found = resumed.fit()
    torch.set_num_threads(threads)
    assert resumed.resumed_at == 5
    assert [dataclasses.replace(e, tok_s=0) for e in found] == [dataclasses.replace(e, tok_s=0) for e in expected]
