"""Which layer a node belongs to, on graphs written by hand."""

from swa_compile.viewer.layers import find_layers, follow_layers


def node(name, kind, *args, module="", caches=(), prologue=False):
    found = {"name": name, "kind": kind, "args": list(args)}
    if module:
        found["module"] = module
    if caches:
        found["caches"] = list(caches)
    if prologue:
        found["prologue"] = True
    return found


def test_the_outermost_number_that_differs_names_the_layer():
    nodes = [
        node("a", "compute", module="model.stages.0.layers.0.norm"),
        node("s0", "store", module="model.stages.0.layers.0.experts.7"),
        node("t0", "attention", module="model.stages.0.layers.0.attn"),
        node("s1", "store", module="model.stages.0.layers.1.experts.7"),
        node("t1", "attention", module="model.stages.0.layers.1.attn"),
        node("head", "compute", module="model.head"),
    ]
    layers = find_layers(nodes)
    assert layers.rule == "module"
    assert layers.names == ["model.stages.0.layers.0", "model.stages.0.layers.1"]
    assert layers.of == {"a": 0, "s0": 0, "t0": 0, "s1": 1, "t1": 1}


def test_one_module_called_twice_is_two_layers_by_order():
    nodes = [
        node("s0", "store", module="block.0", caches=["k0", "v0"]),
        node("t0", "attention", "s0", module="block.0"),
        node("s1", "store", module="block.0", caches=["k1", "v1"]),
        node("t1", "attention", "s1", module="block.0"),
    ]
    layers = find_layers(nodes)
    assert (layers.rule, layers.names) == ("order", ["0", "1"])
    assert layers.of == {"s0": 0, "t0": 0, "s1": 1, "t1": 1}


def test_an_anchor_without_a_module_puts_all_in_order():
    nodes = [
        node("s0", "store", module="layers.0"),
        node("s1", "store", module="layers.1"),
        node("s2", "store"),
    ]
    assert find_layers(nodes).rule == "order"


def test_by_order_a_node_belongs_to_the_anchor_behind_it_and_a_translation_to_its_user():
    nodes = [
        node("loc", "input"),
        node("ids1", "translation", "loc"),
        node("norm0", "compute"),
        node("s0", "store", "loc", caches=["k0", "v0"]),
        node("t0", "attention", "s0"),
        node("mlp0", "compute", "t0"),
        node("cast1", "compute", "ids1"),
        node("s1", "store", "cast1", caches=["k1", "v1"]),
        node("end", "output", "s1"),
    ]
    layers = find_layers(nodes)
    assert layers.of == {
        **{"norm0": 0, "s0": 0, "t0": 0},
        **{"mlp0": 1, "cast1": 1, "ids1": 1, "s1": 1},
    }


def test_k_and_v_written_one_by_one_through_the_same_ids_are_one_layer():
    nodes = [
        node("k0", "store", "a", "ids", caches=["k"]),
        node("v0", "store", "b", "ids", caches=["v"]),
        node("k1", "store", "c", "other", caches=["k"]),
        node("v1", "store", "d", "other", caches=["v"]),
    ]
    assert find_layers(nodes).of == {"k0": 0, "v0": 0, "k1": 1, "v1": 1}


def test_attention_without_a_store_is_a_layer_that_shares_a_cache():
    nodes = [
        node("s0", "store", caches=["k", "v"]),
        node("t0", "attention", "s0"),
        node("t1", "attention", "s0"),
    ]
    assert find_layers(nodes).of == {"s0": 0, "t0": 0, "t1": 1}


def test_stages_behind_the_hoist_keep_the_layers_whatever_their_nodes_are_called():
    before = [
        node("s0", "store", "loc", caches=["k", "v"]),
        node("t0", "attention", "s0"),
        node("s1", "store", "loc", caches=["k", "v"]),
        node("t1", "attention", "s1"),
    ]
    after = [
        node("ids", "compute", "loc", prologue=True),
        node("put", "store", "ids", caches=["k"]),
        node("put_1", "store", "ids", caches=["v"]),
        node("t0", "attention", "put"),
        node("put_2", "store", "ids", caches=["k"]),
        node("put_3", "store", "ids", caches=["v"]),
        node("t1", "attention", "put_2"),
    ]
    found = follow_layers(before, find_layers(before), after)
    assert found.of == {"put": 0, "put_1": 0, "t0": 0, "put_2": 1, "put_3": 1, "t1": 1}


def test_a_graph_without_stores_and_attention_has_no_layers():
    assert find_layers([node("a", "compute"), node("b", "translation", "a")]).names == []
