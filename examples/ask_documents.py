"""Ask questions about a folder of documents: `python ask_documents.py FOLDER "QUESTION"`."""

import sys

import ragspec
from ragspec.pipelines import DocQA

folder = sys.argv[1]
question = sys.argv[2] if len(sys.argv) > 2 else "What is a draft tree?"

engine = ragspec.Engine.from_pretrained("starter")
qa = DocQA.from_documents(folder, engine=engine)
answer = qa.ask(question)

print(answer.text)
for citation in answer.citations:
    quoted = answer.text[citation.answer_start : citation.answer_end]
    print(f"  {citation.document}, characters {citation.start}-{citation.end}: {quoted!r}")
print(answer.report.summary())
