"""The record beside this file as a table in Markdown: mean scores by task and length.

python figures/ruler/primary.py
"""

from pathlib import Path

from diff_transformer.lab.rows import read_rows

if __name__ == "__main__":
    frame = read_rows(Path(__file__).with_name("measured.jsonl.gz"))["ruler"]
    table = frame.pivot_table("score", "task", "length", sort=False)
    table.loc["mean of the tasks"] = table.mean()
    prompts = frame.groupby("length").size() / frame["task"].nunique()
    print("|task|" + "|".join(f"{length:,.0f} tokens, n {prompts[length]:.0f}" for length in table.columns) + "|")
    print("|---" * (len(table.columns) + 1) + "|")
    for task, means in table.iterrows():
        print(f"|{task}|" + "|".join(f"{mean:.2f}" for mean in means) + "|")
