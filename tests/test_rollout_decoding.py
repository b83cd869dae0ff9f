import weakref

import pytest
import torch
from transformers import LlamaConfig

from ragr1_actors.rollout.engines.decoding import RowCache

CONFIG = LlamaConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.engine
def test_a_cache_grows_by_a_quarter_and_never_holds_its_old_and_its_new_layers_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = RowCache(CONFIG, torch.float32, torch.device("cpu"), 100, 1000)
    cache.reserve(8, 60)
    assert cache.scratch == 64
    before = cache.num_bytes
    alive: list[weakref.ref[torch.Tensor]] = [weakref.ref(layer) for layer in cache._data]
    most: list[int] = []
    allocate = cache._allocate

    def watched(rows: int, length: int) -> torch.Tensor:
        made = allocate(rows, length)
        alive.append(weakref.ref(made))
        most.append(sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
        return made

    monkeypatch.setattr(cache, "_allocate", watched)
    cache.reserve(9, 65)
    assert cache.scratch == 80
    assert cache.num_bytes == before * 10 * 81 // (8 * 65)
    assert max(most) < before + cache.num_bytes
