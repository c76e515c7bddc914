"""Trajectories generated after Table 2, and their statistics."""

from typing import Any

import numpy as np
import pytest
from tests.workload_statistics import describe

from dualpath.core.errors import ConfigError, TraceError
from dualpath.workload.columns.generator import (
    DATASETS,
    Dataset,
    GeneratorSettings,
    Tail,
    generate,
    generate_agents,
)
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_rounds

TAILS: list[Tail] = ["gamma", "lognormal", "uniform"]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", DATASETS)
def test_means_of_trajectories_are_those_of_table_2(name: str, tail: Tail):
    dataset = DATASETS[name]

    made = describe(generate_agents(dataset, 500, 7, GeneratorSettings(tail=tail)))

    own = made.per_trajectory
    assert made.turns == pytest.approx(dataset.turns, rel=0.001)
    assert made.total_tokens == pytest.approx(dataset.total_tokens, rel=0.001)
    assert own.append_tokens == pytest.approx(dataset.append_tokens, rel=0.001)
    assert own.generated_tokens == pytest.approx(dataset.generated_tokens, rel=0.001)
    assert own.context_tokens == pytest.approx(dataset.context_tokens, rel=0.001)
    assert made.largest_context_tokens <= dataset.max_tokens


def test_long_trajectories_have_short_turns_so_pooled_means_are_smaller():
    made = describe(generate_agents(DATASETS["64K"], 500, 0))

    assert made.per_turn.append_tokens == pytest.approx(251, rel=0.05)
    assert made.per_turn.generated_tokens == pytest.approx(106, rel=0.05)
    assert 0.985 < made.per_trajectory.hit_rate < made.per_turn.hit_rate < 0.995


def test_the_tail_changes_the_longest_trajectories_only():
    most = [
        describe(generate_agents(DATASETS["64K"], 500, 0, GeneratorSettings(tail=tail))).turns_max
        for tail in ("uniform", "gamma", "lognormal")
    ]

    assert most == sorted(most)
    assert most[2] > 2 * most[0]


def test_equal_seeds_give_equal_bytes_and_others_do_not():
    first, again, other = (
        b"".join(column.tobytes() for column in generate_agents(DATASETS["32K"], 700, seed))
        for seed in (3, 3, 4)
    )

    assert first == again
    assert first != other


def test_more_agents_are_sampled_trajectories_after_a_synthetic_round():
    base = generate_agents(DATASETS["32K"], 500, 1)

    more = generate_agents(DATASETS["32K"], 520, 1)

    rounds = base.rounds
    assert np.array_equal(more.prompt_tokens[:rounds], base.prompt_tokens)
    first = more.first_round[500:520]
    assert set(more.prompt_tokens[first]) == {64}
    assert set(more.generated_tokens[first]) == {1}
    assert set(more.hit_tokens[first]) == {0}
    assert set(more.hit_tokens[first + 1]) == {64}
    firsts = set(base.prompt_tokens[base.first_round[:-1]].tolist())
    assert {int(tokens) - 65 for tokens in more.prompt_tokens[first + 1]} <= firsts
    more.check()


def test_the_cut_at_max_len_also_holds_for_longer_copies():
    more = generate_agents(DATASETS["64K"], 2000, 0)

    assert (more.prompt_tokens + more.generated_tokens).max() <= 65536


def test_scaled_appends_are_cut_at_the_datasets_limit():
    scaled = WorkloadSettings(scale_append=3.0)

    plain = generate_agents(DATASETS["64K"], 200, 0)
    grown = generate_agents(DATASETS["64K"], 200, 0, None, scaled)

    assert (grown.prompt_tokens + grown.generated_tokens).max() <= 65536
    assert grown.rounds < plain.rounds
    assert grown.prompt_tokens[0] == 3 * plain.prompt_tokens[0]


def test_without_truncation_rounds_beyond_the_model_are_refused():
    columns = generate(DATASETS["64K"], 0)

    with pytest.raises(
        TraceError, match=r"round \d+ of agent \d+ needs \d+ tokens, above the context limit of 32"
    ):
        agents_from_rounds(columns, WorkloadSettings(context_limit_tokens=32768))


def test_fewer_agents_than_trajectories_are_the_first_ones():
    few, all_of_them = (generate_agents(DATASETS["48K"], agents, 0) for agents in (20, 500))

    assert np.array_equal(few.prompt_tokens, all_of_them.prompt_tokens[: few.rounds])


def test_the_first_prompt_may_be_given_instead_of_context():
    settings = GeneratorSettings(first_prompt_share=0.1, first_prompt_sigma=0.0)

    columns = generate(DATASETS["64K"], 0, settings)

    first = columns.append_tokens[columns.first_round[:-1]]
    assert first.mean() == pytest.approx(5596, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trajectories": 3}, "trajectories is 3; it must be between 10"),
        ({"append_sigma": -1.0}, "append_sigma is -1.0"),
        ({"tail": "cauchy"}, "tail is 'cauchy'; it must be one of gamma"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        GeneratorSettings(**settings)


def test_impossible_means_are_refused():
    impossible = Dataset("odd", 65536, 157, 100, 50, 55958, 32721)

    with pytest.raises(ConfigError, match="no trajectories can have a mean of 150"):
        generate(impossible, 0)
