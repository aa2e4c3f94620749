"""The page of trajectories in a real browser: 10,000 of them are there in under two seconds, and keys and filters work.

The browser is Debian's: `MEGATHUNDER_BROWSER=1 bash tools/setup.sh`, which tests/run.sh does, installs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.browser import Seen, find_browser, look_at
from tests.unit.metrics.made_run import made_run
from tests.unit.report.made_trajectories import STUDENT, write_trajectories

pytestmark = pytest.mark.skipif(
    find_browser() is None and not os.environ.get("CI"),
    reason="no Chromium: MEGATHUNDER_BROWSER=1 bash tools/setup.sh installs it",
)
UPDATES, GROUPS, SIZE = 20, 50, 10
USE = """(async () => {
  const until = async what => { while (!what()) await new Promise(r => setTimeout(r, 10)); };
  const press = key => document.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  const set = (id, value, kind) => {
    const e = document.getElementById(id);
    e.value = value;
    e.dispatchEvent(new Event(kind));
  };
  const title = () => document.querySelector('main h1')?.textContent ?? '';
  const count = () => document.getElementById('count').textContent;
  const colour = () => document.querySelector('.action pre span')?.style.background ?? '';
  await until(() => window.painted && title());
  const first = title(), rows = document.querySelectorAll('.row').length, total = count();
  press('j'); await until(() => title() !== first);
  const next = title(), good = colour(), text = document.querySelector('main').textContent;
  press('n'); await until(() => title().startsWith('u0/g1'));
  press('c'); const logprob = document.getElementById('colour').value;
  press(']'); await until(() => count().startsWith('500 '));
  const update = count();
  set('low', '1', 'change'); const rewarded = count();
  set('low', '', 'change'); set('end', 'lost', 'change'); const lost = count();
  set('end', '', 'change'); set('update', '', 'change');
  set('find', 'answered 500', 'input'); await until(() => count().startsWith('20 '));
  set('find', '', 'input'); await until(() => count() === total);
  set('order', 'reward', 'change'); await until(() => document.querySelector('.row.on'));
  return {painted: window.painted, first, rows, total, next, good, logprob, update, rewarded, lost,
          markup: document.querySelectorAll('main script, main img').length,
          text};
})()"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = made_run(tmp_path_factory.mktemp("runs"), updates=2, model=str(STUDENT))
    write_trajectories(folder, updates=UPDATES, groups=GROUPS, size=SIZE)
    command = [sys.executable, "-m", "megathunder.report.viewer.server", str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split("http://")[1].split()[0]
        try:
            yield look_at(f"http://{address}", USE, height=800)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130


def test_ten_thousand_trajectories_are_there_in_under_two_seconds(seen: Seen) -> None:
    assert seen.answer["total"] == "10000 of 10000 trajectories"
    assert seen.answer["painted"] < 2000 and 0 < seen.answer["rows"] < 100


def test_keys_and_filters_lead_to_a_trajectory(seen: Seen) -> None:
    found = seen.answer
    assert found["first"].startswith("u0/g0/t0") and found["next"].startswith("u0/g0/t1")
    assert found["good"].startswith("rgba(47, 143, 91") and found["logprob"] == "logprob"
    assert found["update"] == "500 of 10000 trajectories"
    assert found["rewarded"] == "249 of 10000 trajectories"
    assert found["lost"] == "1 of 10000 trajectories"
    assert "read the file" in found["text"] and found["markup"] == 0


def test_nothing_but_this_server_is_asked_and_the_console_is_silent(seen: Seen) -> None:
    assert not seen.errors
    assert len({address.split("/")[2] for address in seen.requests if not address.startswith("data:")}) == 1
