"""The table of op types against TensorFlow's own registry."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tf_echo import op_traits
from tf_echo.op_traits import TRAITS, Kind


@pytest.mark.parametrize("kind", list(Kind))
def test_every_listed_op_exists(kind):
    names = [name for name, traits in TRAITS.items() if traits.kind is kind]
    assert [name for name in names if op_def_registry.get(name) is None] == []


def test_no_replayable_op_is_stateful():
    stateful = [
        n for n in TRAITS if op_traits.is_replayable(n) and op_def_registry.get(n).is_stateful
    ]
    assert stateful == []


def test_no_replayable_op_takes_a_resource():
    def takes_resource(name: str) -> bool:
        return any(
            a.type == tf.resource.as_datatype_enum for a in op_def_registry.get(name).input_arg
        )

    assert [n for n in TRAITS if op_traits.is_replayable(n) and takes_resource(n)] == []


def test_views_have_one_output_for_each_input_whose_memory_they_share():
    for name, traits in TRAITS.items():
        if traits.kind is Kind.VIEW and name != "TensorListGetItem":  # shares a part of its list
            op_def = op_def_registry.get(name)
            assert len(op_def.output_arg) == 1
            assert op_def.input_arg[0].type_attr == op_def.output_arg[0].type_attr


def test_inputs_that_fix_a_shape_or_an_axis_are_never_gated():
    """Inputs with a fixed integer type, or a type attribute of their own that allows nothing but
    integers, are shapes and axes."""
    data = {("OneHot", 0), ("ReverseSequence", 0), ("GatherNd", 1), ("Gather", 1), ("GatherV2", 1)}
    data |= {("SparseSoftmaxCrossEntropyWithLogits", 1), ("TensorListGetItem", 1)}
    for name, traits in TRAITS.items():
        if not op_traits.is_replayable(name) or traits.kind is Kind.RANDOM:
            continue
        arguments = op_def_registry.get(name).input_arg
        listed = range(len(arguments)) if traits.gate_inputs is None else traits.gate_inputs
        for place in listed:
            if place < len(arguments) and (name, place) not in data:
                assert not _is_index(name, arguments[place]), f"{name} input {place}"


def _is_index(name: str, argument: object) -> bool:
    indices = {tf.int32.as_datatype_enum, tf.int64.as_datatype_enum}
    if argument.type_list_attr:
        return False
    if argument.type:
        return argument.type in indices
    attribute = next(a for a in op_def_registry.get(name).attr if a.name == argument.type_attr)
    allowed = set(attribute.allowed_values.list.type)
    return bool(allowed) and allowed <= indices


def test_an_unlisted_op_is_unknown_and_never_replayed():
    assert op_traits.traits_of("NoSuchOp").kind is Kind.UNKNOWN
    assert not op_traits.is_replayable("NoSuchOp")
