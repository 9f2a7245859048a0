from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import dist, worker
from lockstep.errors import UserError
from tests.runs import configure


def loader(digest: str) -> Any:
    return SimpleNamespace(source=SimpleNamespace(digest=digest))


def test_ranks_that_see_different_images_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("data=digits")
    worker.refuse_different_data(config, loader("a"), loader("b"))
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, mine, ["a", "c"]])
    with pytest.raises(UserError, match=r"data\.root = .*rank 2 sees other images than rank 0"):
        worker.refuse_different_data(config, loader("a"), loader("b"))
