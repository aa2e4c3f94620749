"""Rank 0's settings hold on every rank, and its refusal reaches them within seconds."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megathunder.config import Config
from megathunder.errors import UserError
from megathunder.identity import Identity, digest_of, require_same_package, this_package
from megathunder.rendezvous import Refused, Rendezvous


def test_other_ranks_get_the_settings_of_rank_0_whatever_their_own_words_say() -> None:
    store = HashStore()
    learner = dataclasses.replace(Config().learner, learning_rate=3e-5, megatron={"fp8": "hybrid"})
    config = dataclasses.replace(Config(), learner=learner)
    Rendezvous(store, 3).tell(config, ["--learner.learning_rate", "3e-5"])
    heard, remark = Rendezvous(store, 3).hear(["--learner.learning_rate", "3e-5"])
    assert heard == config and not remark
    heard, remark = Rendezvous(store, 3).hear(["--learner.learning_rate", "1e-3"])
    assert heard == config and "not that of rank 0" in remark


def test_a_refusal_is_heard_by_ranks_that_wait_already() -> None:
    store, heard = HashStore(), []

    def wait() -> None:
        try:
            Rendezvous(store, 3).hear([])
        except Refused as refusal:
            heard.append((str(refusal), time.monotonic()))

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
    began = time.monotonic()
    Rendezvous(store, 3).refuse("the folder is taken")
    for thread in waiting:
        thread.join(5)
    assert [words for words, _ in heard] == ["the folder is taken"] * 2
    assert max(at for _, at in heard) - began < 1.0


def test_refusing_does_not_wait_for_ranks_that_have_died() -> None:
    began = time.monotonic()
    Rendezvous(HashStore(), 3).refuse("no")
    assert time.monotonic() - began < 4.0


def test_two_checkouts_are_told_apart_by_their_sources(tmp_path: Path) -> None:
    for name, text in (("a", "x = 1\n"), ("b", "x = 2\n"), ("c", "x = 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(text)
    digests = [digest_of(tmp_path / name) for name in "abc"]
    assert digests[0] == digests[2] != digests[1]
    require_same_package("a copy elsewhere", Identity(version="1", path="/x", digest=this_package().digest))
    with pytest.raises(UserError, match="rank 3 runs megathunder 1"):
        require_same_package("rank 3", Identity(version="1", path="/x", digest="0" * 12))
