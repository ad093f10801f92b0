from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 50
# One process imports the library and forks a child for each kill. The child starts from a copy of
# the store, so that every kill meets the same two outcomes: the text before and the text after.
# A child that ended before its kill came does not count as killed: another one follows it.
SCRIPT = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import numpy as np
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.catalogue import open_view
from ragspec.storage.store import BUILD_PREFIX

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
options = dict()
rng = np.random.default_rng(0)
rows = [rng.integers(0, 90, 60).tolist() for _ in range(400)]

def build(path):
    CorpusIndex.build(rows[200:], None, path, vocab_size=97, segment_tokens=3000, **options).close()

def merge(path):
    store = CorpusIndex.open(path, **options)
    store.merge()
    store.close()

def seal(path):
    store = CorpusIndex.open(path, **options)
    for row in rows[200:260]:
        store.append(row, scope="global")
    store.close()

def text(path):
    view = open_view(path, "full")
    return sorted(d.tolist() for s in view.segments for d in s.documents())

def state(change, path):  # a merge keeps the text: the number of segments tells
    return text(path), change is merge and len(open_view(path, "full").segments)

base = folder / "base"
store = CorpusIndex.build(rows[:100], None, base, vocab_size=97, segment_tokens=2000, **options)
store.append(rows[100], scope="global")
store.seal()
store.append(rows[101], scope="tenant")
store.close()

draw = random.Random(7)
found = []
changes = [build, merge, seal]
seconds, outcomes = {}, {}
for change in changes:
    path = folder / change.__name__
    shutil.copytree(base, path)
    began = time.perf_counter()
    change(path)
    seconds[change] = 1.2 * (time.perf_counter() - began)
    outcomes[change] = (state(change, base), state(change, path))
while sum(row[2] for row in found) < kills and len(found) < 4 * kills:
    change = changes[len(found) % len(changes)]
    path = folder / f"kill-{len(found)}"
    shutil.copytree(base, path)
    child = os.fork()
    if child == 0:
        try:
            change(path)
        finally:
            os._exit(0)
    time.sleep(draw.random() * seconds[change])
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    before, after = outcomes[change]
    left = state(change, path)
    verdict = "old" if left == before else "new" if left == after else "neither"
    killed = os.WIFSIGNALED(status)
    # A busy machine is slower at times: a writer that ended before its kill asks for a sooner one.
    seconds[change] *= 1.1 if killed else 0.8
    rubbish = list(path.glob(BUILD_PREFIX + "*"))
    seal(path)  # the next writer clears up and goes on
    whole = not list(path.glob(BUILD_PREFIX + "*")) and len(text(path)) == len(left[0]) + 60
    found.append([change.__name__, verdict, killed, bool(rubbish), whole])
    shutil.rmtree(path)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no SIGKILL")
def test_killed_at_random_moments_the_old_or_the_new_store_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(KILLS)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    killed = [row for row in result if row[2]]
    assert len(killed) == KILLS
    assert {verdict for _, verdict, *_ in result} == {"old", "new"}
    assert {verdict for _, verdict, hit, *_ in result if not hit} == {"new"}
    assert all(whole for *_, whole in result)
    assert any(rubbish for *_, rubbish, _ in killed)  # some are hit in the midst of their files
