"""Whatever a `config.json` says, it is refused or gives numbers that can be computed with."""

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.core.errors import ConfigError
from dualpath_sim.catalog.costs import model_costs
from dualpath_sim.catalog.families import FAMILIES
from dualpath_sim.catalog.load import MODELS, find, load_cluster, load_gpu, load_model, names

PUBLISHED = [
    json.loads(file.read_bytes())
    for file in (find(MODELS, name) for name in names(MODELS))
    if file.name.endswith(".json")
]
KEYS = sorted({key for config in PUBLISHED for key in config} | {"layer_types", "text_config"})
SIZES = ["hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"]
#: Published files give the dimension of heads; without it hidden size and heads do.
PUBLISHED += [{**config, "head_dim": None} for config in PUBLISHED]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([None, True, 0, 1 << 40, 1 << 63, 1e300, "", "fp8", [], {}, [1, 0], ["x"]]),
    st.sampled_from(sorted(FAMILIES)),
)
HOPPER, CLUSTER = load_gpu("hopper"), load_cluster("paper-660b")


@settings(max_examples=300)
@given(
    st.sampled_from(PUBLISHED),
    st.dictionaries(st.sampled_from(SIZES), st.integers(1, 70), max_size=2),
    st.one_of(st.just({}), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)),
    st.sampled_from(["auto", "fp8"]),
)
def test_a_config_is_refused_or_computed_with(
    tmp_path_factory: Any,
    config: dict[str, Any],
    sizes: dict[str, int],
    changes: dict[str, Any],
    kv_cache_dtype: Any,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **changes}))
    try:
        model = load_model(folder / "config.json", kv_cache_dtype)
        costs = model_costs(model, HOPPER, CLUSTER)
    except ConfigError:
        return
    numbers = [
        model.weight_bytes,
        costs.kv_bytes_per_token,
        costs.prefill.attention_token_s,
        costs.decode.step_s,
        costs.prefill_tokens_per_s,
    ]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert math.isfinite(model.cache_compute_ratio(16384, 429))
    stored = sum(run.layers * len(run.stored) for run in model.attention)
    assert model.block_geometry(64).layers == stored
