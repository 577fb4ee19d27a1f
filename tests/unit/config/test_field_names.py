"""Names that are no fields: what they may be meant for."""

from __future__ import annotations

import pytest

from perdure.training.config.job import Job
from perdure.training.config.reading import names_meant


@pytest.mark.parametrize(
    ("location", "meant"),
    [
        (("stepz",), ("steps",)),
        (("model", "hiden_size"), ("hidden_size",)),
        (("engine", "slots_per_nodes"), ("slots_per_node",)),
        (("restart", "max_restart"), ("max_restarts",)),
        (("comm", "op_retry", "max_counts"), ("max_count",)),
        (("drill", "faults", 0, "stp"), ("step",)),
        (("env_from", "HF_TOKEN", "files"), ("file",)),
        # of another section, where it would belong
        (("num_layers",), ("model.num_layers",)),
        (("num_layer",), ("model.num_layers",)),
        (("model", "lr"), ("optimizer.lr",)),
        (("model", "every_steps"), ("checkpoint.every_steps",)),
        (("data", "kind"), ("engine.kind", "parallelism.kind", "tokenizer.kind")),
        # `step` is a field of a drill's faults alone
        (("model", "stop"), ()),
        (("colour",), ()),
        (("model", "depth"), ()),
    ],
)
def test_a_name_is_meant_for_a_field_of_its_section_or_for_where_it_belongs(location, meant):
    assert names_meant(Job, location) == meant
