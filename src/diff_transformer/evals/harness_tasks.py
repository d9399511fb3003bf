"""Tasks for lm-evaluation-harness: its own by name, and ours in its form."""

from functools import cache
from pathlib import Path

from diff_transformer.data.multiple_choice import MultipleChoiceSet

PAPER_TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "openbookqa", "piqa", "winogrande")  # that hold them in lm_eval


def harness_task(name: str):
    """A task of the harness by its name, with its data.

    Raises:
        ValueError: for a name it does not have, or data that are neither cached nor to be downloaded.
    """
    manager = task_manager(name in PAPER_TASKS)
    if name not in manager.all_tasks:
        raise ValueError(f"lm-evaluation-harness has no task {name!r}; the paper's are {', '.join(PAPER_TASKS)}")
    try:
        found = manager.load([name])["tasks"]
    except Exception as error:  # what the hub raises without a network depends on versions and on where it fails
        raise ValueError(
            f"the data of {name} are not cached and cannot be downloaded ({type(error).__name__}: {str(error)[:200]}); "
            "connect this machine, or set data to a file or folder of tasks, or to python"
        ) from error
    if name not in found:
        raise ValueError(f"{name!r} is a group of tasks; name its tasks one by one")
    return found[name]


@cache
def task_manager(of_the_paper: bool):
    """The harness's index of tasks: of the folders with the paper's tasks alone, as the whole takes long to read."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / name for name in FOLDERS if (root / name).is_dir()]
    if of_the_paper and len(folders) == len(FOLDERS):
        return lm_eval.tasks.TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    return lm_eval.tasks.TaskManager()


def local_task(name: str, tasks: MultipleChoiceSet):
    """Our items as a task of the harness: a question in ARC's way, or a text to continue in HellaSwag's."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    def split(part) -> datasets.Dataset:
        return datasets.Dataset.from_list([
            {
                "text": item.question if item.completion else f"Question: {item.question}\nAnswer:",
                "choices": list(item.choices), "answer": item.answer,
            }
            for item in part
        ])  # fmt: skip

    def load(**_: object) -> dict[str, datasets.Dataset]:
        parts = {"test": split(tasks.items)}
        return {**parts, "train": split(tasks.examples)} if tasks.examples else parts

    config = {
        "task": name, "custom_dataset": load, "output_type": "multiple_choice", "test_split": "test",
        "fewshot_split": "train" if tasks.examples else "test", "num_fewshot": 0,
        "doc_to_text": lambda doc: doc["text"], "doc_to_choice": lambda doc: doc["choices"],
        "doc_to_target": lambda doc: doc["answer"],
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
    }  # fmt: skip
    return ConfigurableTask(config=config)


def check_shots(name: str, source: object, shots: int) -> None:
    """Raise ValueError if a task of our own has fewer examples than ``shots``."""
    if isinstance(source, MultipleChoiceSet):
        there = len(source.examples) or len(source.items) - 1
        if shots > there:
            raise ValueError(f"{shots} shots are more than the {there} examples that {name} has; give fewer")
