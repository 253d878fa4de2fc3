"""What the page tells, against what the models of conftest.py do."""

from swa_compile.viewer.dump import Dump
from swa_compile.viewer.story import tell


def lanes(story, stage):
    return [layer["stages"][stage] for layer in story["layers"]]


def test_each_layer_has_its_calls_and_what_they_feed(model_dump):
    story = tell(Dump.read(model_dump))

    assert (story["rule"], story["before"]) == ("module", "functional")
    assert [layer["name"] for layer in story["layers"]] == [f"layers.{i}" for i in range(4)]
    loc, table = (
        next(i for i, v in enumerate(story["values"]) if v["loc"] == name)
        for name in ("loc", "page_table")
    )
    for number, lane in enumerate(lanes(story, "functional")):
        assert [c["value"] for c in lane["calls"]] == ([] if number == 1 else [loc, table])
    for stage, store_calls in (("functional", 1), ("hoisted", 1), ("lowered", 2)):
        for number, lane in enumerate(lanes(story, stage)):
            fed = [(a["kind"], a["values"]) for a in lane["anchors"]]
            ids, pages = ([], []) if number == 1 else ([loc], [table])
            assert fed == [("store", ids)] * store_calls + [("attention", pages)], stage
    assert all(not lane["calls"] for lane in lanes(story, "lowered"))
    assert [c["value"] for c in lanes(story, "captured")[0]["calls"]] == [loc, table]


def test_a_value_is_found_again_at_each_stage(model_dump):
    dump = Dump.read(model_dump)
    story = tell(dump)
    for value in story["values"]:
        assert len(value["nodes"]["functional"]) == value["uses"] == 3
        assert value["nodes"]["hoisted"] == [value["node"]]
        mapping, ids = value["operands"]
        assert story["inputs"][mapping] == "mapping" and story["inputs"][ids] == value["loc"]
        by_name = {node["name"]: node for node in dump.stage("lowered")}
        assert value["nodes"]["lowered"]
        assert all(by_name[name]["prologue"] for name in value["nodes"]["lowered"])


def test_refused_values_are_told_with_their_calls_and_their_users(mixed_dump):
    story = tell(Dump.read(mixed_dump))
    refused = {v["code"]: v for v in story["values"] if v["code"]}
    assert set(refused) == {"MAPPING_WRITTEN", "LOC_FROM_ACTIVATIONS"}
    assert sum(bool(v["code"]) for v in story["values"]) == 3  # before and behind the write
    assert [v["message"].split()[0] for v in story["values"] if v["code"] == "MAPPING_WRITTEN"] == [
        "draft",
        "draft",
    ]
    (hoisted,) = (i for i, v in enumerate(story["values"]) if not v["code"])
    codes = [
        [story["values"][i]["code"] for a in lane["anchors"] for i in a["values"]]
        for lane in lanes(story, "hoisted")
    ]
    assert codes == [["MAPPING_WRITTEN"], ["LOC_FROM_ACTIVATIONS"], ["MAPPING_WRITTEN"], [""]]
    assert lanes(story, "hoisted")[3]["anchors"][0]["values"] == [hoisted]
    assert story["rule"] == "order"
