"""Every line of docs/generation.md, checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.generation_features import FEATURES, GROUPS, Feature, Missing, markdown

TABLE = Path(__file__).parents[1] / "docs" / "generation.md"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: f"{feature.name}-{feature.verdict}")
def test_the_table_tells_the_truth(feature: Feature) -> None:
    try:
        feature.check()
    except Missing:
        pytest.skip(f"transformers {transformers.__version__} does not have it")


def test_the_table_in_the_docs_is_the_list() -> None:
    assert TABLE.read_text() == markdown()


def test_every_feature_stands_in_a_group_under_a_name_of_its_own() -> None:
    assert {feature.group for feature in FEATURES} == set(GROUPS)
    names = [(feature.group, feature.name) for feature in FEATURES]
    assert len(set(names)) == len(names)
