"""Would these tests see a mistake? Each is put into a copy of the code, and must be seen."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Fault

ROOT = Path(__file__).parents[2]
RESUME, SAVE = "tests/training/test_exact_resume.py", "tests/runs/test_checkpoint.py"
PHASES, EWMA = "tests/test_phases.py -k", "tests/test_proximal.py -k"
STEP = "            means.add(*step(minibatch, *coefficients))\n"
FOLLOW = "            learner.update_proximal_policy(phase)\n"
MUTANTS: tuple[tuple[str, str, str, str], ...] = (
    ("optimize.py", "(~apply_if).to(torch.float)", "torch.zeros(())",
     "tests/faults/test_numerics.py"),
    ("learner.py", 'self.generator.set_state(state["generator"])', "pass", RESUME),
    ("training/run.py", 'set_state(state["action_generator"])', "get_state()", RESUME),
    ("learner.py", '"reward_normalizer", ', "", RESUME),
    ("learner.py", 'optimize.load_state_(optimizer, state["optimizers"][name])', "pass", RESUME),
    ("optimize.py", "if value.shape == parameter.shape:", "if False:",
     "tests/training/test_run.py -k images"),
    ("training/run.py", 'range(state["num_filled"])', "range(0)", RESUME),
    ("collect.py", 'self._first = state["first"]', 'self._first = ~state["first"]', RESUME),
    ("envs/bridge.py", "self._lengths[ended] = 0", "pass", RESUME),
    ("runs/metrics.py", "self._file.truncate(self.size)", "pass", "tests/runs/test_metrics.py"),
    ("runs/checkpoint.py", "os.replace(temporary, final)",
     "shutil.copytree(temporary, final)", SAVE),
    ("runs/checkpoint.py", "                fsync_path(folder)\n", "", SAVE),
    ("runs/checkpoint.py", "(folder)[:-keep]", "(folder)[:keep]", SAVE),
    ("runs/checkpoint.py", "digest != hash_file(path / file)", "False",
     "tests/runs/test_checkpoint.py -k flipped_bit"),
    ("runs/checkpoint.py", 'if run_id and manifest["run"] != run_id:', "if False:", SAVE),
    ("runs/lock.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
     "tests/runs/test_lock.py"),
    ("runs/directory.py", "        if refused and not accept:\n", "        if False:\n",
     "tests/faults/test_determinism.py -k changed"),
    ("training/run.py", "            self._save_on_exit()\n", "            pass\n",
     "tests/training/test_interruption.py"),
    ("phases.py", "_k2(log_prob, proximal_", "_k2(log_prob, old_", f"{EWMA} fraction"),
    ("phases.py", "_ratios(log_prob, proximal_", "_ratios(log_prob, old_", f"{EWMA} fraction"),
    ("phases.py", STEP + FOLLOW, FOLLOW + STEP, f"{EWMA} average"),
    ("phases.py", "learner.proximal.reset(agent)", "pass", f"{EWMA} average"),
    ("phases.py", "(*samples.inputs, samples.action_mask)", "samples.inputs", f"{PHASES} masks"),
    ("phases.py", "if not learner.ends_aux_interval:", "if True:", f"{PHASES} statistics_count"),
    ("phases.py", "agent.value_normalizer.denormalize(value)", "value", f"{PHASES} units"),
    ("training/evaluation.py", "AgentInput(step.obs, ended,",
     "AgentInput(step.obs, ended & False,", "tests/training/test_evaluate.py -k memory"),
)  # fmt: skip
"""Mistakes: file of the package, text, replacement, and the tests that must fail."""


@pytest.mark.long
@pytest.mark.fault("F-24", "a mistake put into the code: a test fails", 1, 26)
def test_mistakes_are_seen(tmp_path: Path, fault: Fault) -> None:
    fault.wanted = min(fault.wanted, len(MUTANTS))
    for number in fault:
        file, old, new, tests = MUTANTS[number]
        folder = tmp_path / str(number)
        shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "phasicrl" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has no {old!r} any more; name another mistake"
        path.write_text(text.replace(old, new))
        words = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests.split()]
        env = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 1, f"{file}: {old!r} was not seen\n{done.stdout[-1000:]}"


def test_the_mistakes_can_be_put_in() -> None:
    for file, old, _, tests in MUTANTS:
        assert (ROOT / "src" / "phasicrl" / file).read_text().count(old) == 1, (file, old)
        assert (ROOT / tests.split()[0]).is_file()
