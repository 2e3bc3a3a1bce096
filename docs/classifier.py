"""Train a classifier of sentences on top of a BERT: ``python docs/classifier.py MODEL SENTENCES OUT``.

MODEL is the folder of a Hugging Face model. Each line of SENTENCES has a label, a tab and a sentence. Every fifth sentence
is held out. OUT is the folder to write.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

set_seed(1)
model_folder, sentences, out = sys.argv[1:]
labels, texts = zip(*(line.split("\t", 1) for line in Path(sentences).read_text("utf-8").splitlines()), strict=True)
names = sorted(set(labels))
tokenizer = AutoTokenizer.from_pretrained(model_folder)
model = AutoModelForSequenceClassification.from_pretrained(
    model_folder,
    num_labels=len(names),
    id2label=dict(enumerate(names)),
    label2id={name: n for n, name in enumerate(names)},
)
inputs = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
targets = torch.tensor([names.index(label) for label in labels])
held_out = torch.arange(len(texts)) % 5 == 4
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for _ in range(10):
    for batch in (~held_out).nonzero().flatten()[torch.randperm(int((~held_out).sum()))].split(16):
        model(**{name: value[batch] for name, value in inputs.items()}, labels=targets[batch]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
model.eval()
with torch.no_grad():
    found = model(**{name: value[held_out] for name, value in inputs.items()}).logits.argmax(-1)
print(f"{(found == targets[held_out]).float().mean():.1%} of {len(found)} held-out sentences are classified correctly")
model.save_pretrained(out)
tokenizer.save_pretrained(out)
