"""The table of all readers of untrusted files."""

import gzip
import json
from functools import partial

from bert.checkpoints.weights import save_weights
from bert.configuration.run_plan import read_plan, write_plan
from cluster.view import write_view
from compliance.check.output import read_known
from dataloading.text.documents import read_documents
from tests.bert import foreign_inputs as inputs
from tests.bert.checkpoints import test_tensorflow
from tests.bert.parallel import strangers
from tests.bert.small_models import drawn_model
from tests.bert.test_run_plan import planned
from tests.cluster.test_view import made_up
from tests.compliance import foreign_results as results
from tests.compliance.result_folders import describe_system
from tests.compliance.run_logs import write_metrics
from tests.conftest import REPOSITORY
from tests.dataloading import foreign_data as data
from tests.dataloading.made_up import TEXT, TOKENS
from tests.dataloading.shards import test_tfrecord
from tests.e2e.test_results_workflow import change_names
from tests.fuzz.attempt import Target, made, rewritten

ARTICLES = [
    path.read_bytes() for path in sorted((REPOSITORY / "tests/dataloading/text/wikipedia/text/AA").glob("wiki_*"))
]
KEYS = (b"seed ", b"eval_accuracy ", b"run_stop ")
VALUES = (b"1", b"0.72", b'"success"', b"null", b"true", b"[1]", b'{"a": 1}')
SPLITTING = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": True,
    "strip_accents": None,
    "do_basic_tokenize": True,
}
TABLE = {"scaling_factor": 1.01, "runs": [{"run": 0, "seconds": 1.0, "accuracy": 0.7, "converged_samples": 9}]}
KNOWN = [{"file": "a", "findings": [{"key": "seed", "rule": "TR 5.1", "found": "no seed", "line": 3}]}]
TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "[PAD]"}],
    "normalizer": {"type": "BertNormalizer", "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {"type": "WordPiece", "vocab": {token: index for index, token in enumerate(TOKENS)}},
}
SETTINGS = (
    b'recipe = "tiny_cpu"\n[training]\nglobal_batch_size = 32\nseed = 7\nimplementations = {gelu = "triton"}\n[model]\n'
    b'num_hidden_layers = 2\nhidden_dropout = 0.1\n[evaluation]\ntarget = 0.5\n[data]\ntrain = "a b"\n[log]\nsystem = "x"\n'
)
HEADER = b"# config.recipe: tiny_cpu\n# config.training.seed: 3\n# config.evaluation.target: None\n"
TREE = (
    b"results/a/bert/result_0.txt\tlog\nresults/a/bert/result_1.txt\tlog abc\nsystems/a.json\tsystem\nbenchmarks/x\ty\n"
    b'results/a/bert/metrics_0.jsonl\t{"event": "step", "step": 1, "samples": 8, "loss": 2.0, "step_ms": 3.0}\n'
    b'results/a/bert/scaling.json\t{"scaling_factor": 1.01}\nresults/a/bert/other.log\tlink result_0.txt\n'
    b'results/a/bert/r.json\t{"runs": [{"run": 0, "seconds": 1, "accuracy": 0.7, "converged_samples": 9}]}\nx\tpipe\n'
    b"README.md\t| a | closed | bert | 2 | 1.0 | 1.0 |\nbenchmarks/bert/a/a_x.json\t" + b'{"logged": {"seed": 1}}'
)
NAMES = (b"a/bert/result_0.txt\0systems/a.json\0result_1.txt", b"systems/b/bert/metrics_0.jsonl\0a b\0-x")
BEAT = b'{"phase": "forward", "step": 3, "entered": 4, "limit": 60.0}\n'

reread_settings = rewritten(inputs.take_settings, inputs.write_header)
reread_vocabulary = rewritten(data.take_vocabulary, lambda found, path: path.write_bytes(found.content))
reread_text = rewritten(  # with a byte order mark, because a first letter U+FEFF would be taken for one
    lambda path: read_documents([path]),
    lambda found, path: path.write_text("\n\n".join(map("\n".join, found)), "utf-8-sig"),
)

TARGETS = (
    Target("log", results.read, results.logs, "result_0.txt", 40),
    Target("compressed log", results.read, lambda: [*map(gzip.compress, results.logs())], "result_0.txt.gz"),
    Target("check", results.judge, results.logs, "result_0.txt", 30),
    Target("damaged record", results.judge_damaged,
           lambda: [key + value for key in KEYS for value in VALUES], "record", 40),
    Target("watch", results.watch, results.logs, "result_0.txt", 40),
    Target("metrics", results.rewrite_metrics, lambda: [made(write_metrics)], "metrics_0.jsonl"),
    Target("description", results.describe, lambda: [json.dumps(describe_system(), indent=1).encode()], "system.json"),
    Target("derived tables", results.compare_derived,
           lambda: [json.dumps(TABLE).encode(), b"run,seconds,accuracy,converged_samples\n0,1.0,0.7,9\n"], "scaling.json"),
    Target("known findings", read_known, lambda: [json.dumps(KNOWN).encode()], "known.json"),
    Target("submission", results.judge_tree, lambda: [TREE], "listed", 4),
    Target("names in a pull request", change_names, lambda: [*NAMES], "names", 10),
    Target("settings", reread_settings, lambda: [SETTINGS], "settings.toml", 40),
    Target("header of a result", reread_settings, lambda: [HEADER], "result_0.txt", 10),
    Target("plan", rewritten(read_plan, write_plan), lambda: [made(partial(write_plan, planned()))], "p.json",
           seal=inputs.sealed),
    Target("view", rewritten(inputs.take_view, write_view), lambda: [made(partial(write_view, made_up(2)))], "v.json",
           seal=inputs.sealed),
    Target("shard", data.take_shard, data.shards, "part.hdf5"),
    Target("TFRecord", data.take_shard, lambda: [test_tfrecord.framed(test_tfrecord.example(test_tfrecord.SAMPLE))],
           "part.tfrecord", seal=test_tfrecord.sealed),
    Target("manifest", data.take_dataset, lambda: [made(data.write_folder, "manifest.json")], "manifest.json"),
    Target("length index", data.take_dataset, lambda: [made(data.write_folder, "lengths.npy")], "lengths.npy"),
    Target("vocabulary", reread_vocabulary, lambda: ["\n".join(TOKENS).encode()], "vocab.txt"),
    Target("tokenizer", reread_vocabulary, lambda: [json.dumps(TOKENIZER).encode()], "tokenizer.json"),
    Target("tokenizer's configuration", data.take_vocabulary, lambda: [json.dumps(SPLITTING).encode()],
           "tokenizer_config.json"),
    Target("text", reread_text, lambda: [TEXT.encode(), gzip.compress(TEXT.encode())], "text.txt"),
    Target("articles", data.take_articles, lambda: [*ARTICLES, b'{"title": "a", "text": "One. Two."}\n{"text": "b"}\n'],
           "wiki_00", 30),
    Target("own weights", inputs.take_checkpoint, lambda: [made(partial(save_weights, drawn_model(inputs.CONFIG, 0)))],
           "ours.safetensors", 50),
    Target("foreign weights", inputs.take_checkpoint, lambda: [inputs.theirs()], "theirs.safetensors"),
    Target("configuration", inputs.take_checkpoint, lambda: [json.dumps(inputs.CONFIGURATION).encode()], "config.json", 50),
    Target("index of weights", inputs.take_checkpoint, lambda: [inputs.index_of_theirs()], "model.safetensors.index.json"),
    Target("TensorFlow index", inputs.take_checkpoint, lambda: [(inputs.BUNDLES / "tf1.index").read_bytes()], "tf1.index",
           seal=test_tensorflow.sealed_index),
    Target("hub", strangers.disturb_hub, lambda: [b"0 0\n" + BEAT, b"0\n", b"x" * 9000], "said"),
    Target("heartbeats", strangers.judge_lines,
           lambda: [BEAT * 3 + b'{"failed": "x", "status": 3}\n{"left": true}\n'], "said"),
    Target("meeting", strangers.disturb_meeting,
           lambda: [b"\x00\x3c\x85\xf7\x3c\0\0\0\x01", b"0123456789abcdef"], "said", 30),
)  # fmt: skip
