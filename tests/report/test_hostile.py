"""Text from documents is data: it can neither end a script nor open an element."""

import json
from html.parser import HTMLParser

import pytest

from diff_transformer.report.markup import escape, script_json, tag
from diff_transformer.report.page import render_page

ATTACK = "</script><img src=x onerror=alert(1)><!--<script>'\"&amp;\u2028\x00\ud800"
KEPT = {"schema", "attention", "eval", "seed", "first", "second", "verdict", "better"}


class Elements(HTMLParser):
    """Every element and the attributes that could run code."""

    def __init__(self):
        super().__init__()
        self.names, self.handlers = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def poison(value, key=""):
    """Every string of the results replaced by the attack, keys of free dictionaries too."""
    if isinstance(value, str):
        return value if key in KEPT else ATTACK
    if isinstance(value, list):
        return [poison(v, key) for v in value]
    if isinstance(value, dict):
        free = key in ("mixture", "parameters_by_part", "config", "provenance")
        return {(f"{ATTACK}{k}" if free else k): poison(v, k) for k, v in value.items()}
    return value


def parse(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    return parser


def test_hostile_text_adds_no_element_and_no_handler(results):
    clean, hostile = parse(render_page(results)), parse(render_page(poison(results)))
    assert "img" not in hostile.names
    assert hostile.handlers == []
    assert hostile.names.count("script") == clean.names.count("script") == 2
    assert hostile.names.count("section") == clean.names.count("section")


def test_hostile_tokens_arrive_whole_in_the_explorer(results):
    results["explorer"] = results["explorer"][:1]
    results["explorer"][0]["tokens"][5] = ATTACK
    page = render_page(results)
    start = page.index('id="explorer-data">') + len('id="explorer-data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert data["examples"][0]["tokens"][5] == ATTACK


def test_page_with_lone_surrogates_can_be_encoded(results):
    render_page(poison(results)).encode("utf-8")


def test_script_json_has_no_character_that_html_reads():
    text = script_json({"a": "</script><!--&", "b": [1, None, 0.5]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&", "b": [1, None, 0.5]}
    with pytest.raises(ValueError, match="JSON compliant"):
        script_json(float("nan"))


def test_tag_escapes_children_and_attributes_but_not_elements():
    built = tag("p", "a < b", tag("b", '"'), title='x" onload="y', hidden=True, id=None)
    assert built == '<p title="x&quot; onload=&quot;y" hidden>a &lt; b<b>&quot;</b></p>'
    assert built + "<" == f"{built}&lt;"
    assert escape("a\x00b\ud800") == "a\ufffdb\ufffd"
