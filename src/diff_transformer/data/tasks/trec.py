"""TREC question classification: ``LOC:city What is the capital of Norway ?``, one question a line, in Latin-1."""

from pathlib import Path

from diff_transformer.data.tasks.types import Labelled, make_example
from diff_transformer.errors import UserError

COARSE = {
    "ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human", "LOC": "location", "NUM": "number",
}  # fmt: skip
FINE = {
    "ABBR:abb": "abbreviation", "ABBR:exp": "expansion of an abbreviation",
    "DESC:def": "definition", "DESC:desc": "description", "DESC:manner": "manner", "DESC:reason": "reason",
    "ENTY:animal": "animal", "ENTY:body": "body part", "ENTY:color": "color", "ENTY:cremat": "creative work",
    "ENTY:currency": "currency", "ENTY:dismed": "disease or medicine", "ENTY:event": "event", "ENTY:food": "food",
    "ENTY:instru": "musical instrument", "ENTY:lang": "language", "ENTY:letter": "letter", "ENTY:other": "other entity",
    "ENTY:plant": "plant", "ENTY:product": "product", "ENTY:religion": "religion", "ENTY:sport": "sport",
    "ENTY:substance": "substance", "ENTY:symbol": "symbol", "ENTY:techmeth": "technique or method",
    "ENTY:termeq": "equivalent term", "ENTY:veh": "vehicle", "ENTY:word": "word",
    "HUM:desc": "description of a person", "HUM:gr": "group or organization", "HUM:ind": "individual",
    "HUM:title": "title of a person",
    "LOC:city": "city", "LOC:country": "country", "LOC:mount": "mountain", "LOC:other": "other location",
    "LOC:state": "state",
    "NUM:code": "code", "NUM:count": "count", "NUM:date": "date", "NUM:dist": "distance", "NUM:money": "money",
    "NUM:ord": "order or rank", "NUM:other": "other number", "NUM:perc": "percentage", "NUM:period": "period of time",
    "NUM:speed": "speed", "NUM:temp": "temperature", "NUM:volsize": "volume or size", "NUM:weight": "weight",
}  # fmt: skip


def trec_words(code: str, *, fine: bool) -> str:
    """The words of a code such as ``LOC:city``, or of its coarse class.

    Raises:
        ValueError: for an unknown code.
    """
    words = FINE.get(code) if fine else COARSE.get(code.partition(":")[0])
    if words is None:
        raise UserError(f"{code!r} is not a {'fine' if fine else 'coarse'} class of TREC")
    return words


def read_label_file(path: Path, *, fine: bool) -> list[Labelled]:
    """The questions of a ``.label`` file, with the 6 coarse or the 50 fine classes.

    Raises:
        ValueError: for a line that is not ``CLASS:class question``, naming it.
    """
    examples = []
    for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), start=1):
        if not line.strip():
            continue
        code, _, text = line.strip().partition(" ")
        try:
            if not text.strip():
                raise UserError("no question after the class")
            examples.append(make_example(text, trec_words(code, fine=fine)))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; TREC lines read 'LOC:city What is ... ?'") from None
    return examples
