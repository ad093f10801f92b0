"""Ask the bundled documents ten questions, plainly and with speculation: `python demo.py [MODEL]`.

Both runs use one model in float32, so their texts must be equal. They take turns in going first,
and both are warmed up before anything is timed. QUESTIONS in the environment limits the questions.
"""

import json
import os
import statistics
import sys
from pathlib import Path

import ragspec
from ragspec.pipelines import DocQA

LOOPING = 0.2  # share of tokens inside loops above which an answer is left out of the median

guide = Path(ragspec.__file__).parent / "starter" / "guide"
lines = (guide.parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
questions = [json.loads(line)["question"] for line in lines][: int(os.environ.get("QUESTIONS", 10))]

engine = ragspec.Engine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "starter", dtype="float32"
)
qa = DocQA.from_documents(guide, engine=engine)
plain = ragspec.Engine(engine.target, engine.tokenizer, drafter=None)
askers = {"plain": DocQA(qa.retriever, engine=plain), "speculative": qa}
for asker in askers.values():
    asker.ask(questions[0], max_new_tokens=8, refuse=False)

ratios, different = [], []
for number, question in enumerate(questions):
    print(f"\n{number + 1}/{len(questions)} {question}")
    order = list(askers) if number % 2 == 0 else list(reversed(askers))
    answers = {name: askers[name].ask(question, refuse=False) for name in order}
    answer, seconds = answers["speculative"], {n: answers[n].report.decode_seconds for n in order}
    if answer.generation.tokens != answers["plain"].generation.tokens:
        different.append(question)
    ratio = seconds["plain"] / seconds["speculative"]
    if answer.report.loop_share <= LOOPING:
        ratios.append(ratio)
    print(answer.text)
    for citation in answer.citations:
        print(f"  from {citation.document}, {citation.place}")
    print(f"  {answer.report.tokens} tokens, decoded {ratio:.2f} times as fast as plainly")

print(f"\n{len(questions) - len(different)} of {len(questions)} texts equal plain decoding", end="")
if ratios:
    print(f"; median speedup of decoding {statistics.median(ratios):.2f}", end="")
print(f" ({len(questions) - len(ratios)} looping answers left out)")
if different:
    sys.exit(f"These answers differ, which must not happen in float32: {'; '.join(different)}")
