"""Make edge_64.tfrecord from synthetic text: TensorFlow writes and reads the file, and our reader must agree.

    pip install -e .[train] tensorflow-cpu==2.21.0
    python -m tests.dataloading.shards.tfrecord.make

Nothing else needs TensorFlow. The file is reproducible.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

from dataloading.shards.formats import open_shard
from dataloading.shards.samples import Samples
from tests.dataloading.shards.tfrecord.edge_samples import MAX_PREDICTIONS_PER_SEQ, MAX_SEQ_LENGTH, edge_samples

TARGET = Path(__file__).with_name("edge_64.tfrecord")
WIDTHS = {"input_ids": MAX_SEQ_LENGTH, "input_mask": MAX_SEQ_LENGTH, "segment_ids": MAX_SEQ_LENGTH}
WIDTHS |= {"masked_lm_positions": MAX_PREDICTIONS_PER_SEQ, "masked_lm_ids": MAX_PREDICTIONS_PER_SEQ}
WIDTHS |= {"masked_lm_weights": MAX_PREDICTIONS_PER_SEQ, "next_sentence_labels": 1}


def padded(samples: Samples, row: int) -> dict[str, np.ndarray]:
    tokens = slice(*samples.sequence_offsets[[row, row + 1]])
    masked = slice(*samples.masked_lm_offsets[[row, row + 1]])
    values = {
        "input_ids": samples.input_ids[tokens],
        "input_mask": np.ones(samples.lengths[row], np.int64),
        "segment_ids": samples.segment_ids[tokens],
        "masked_lm_positions": samples.masked_lm_positions[masked],
        "masked_lm_ids": samples.masked_lm_ids[masked],
        "masked_lm_weights": np.ones(samples.masked_counts[row], np.float32),
        "next_sentence_labels": samples.next_sentence_labels[row : row + 1],
    }
    return {name: np.pad(value, (0, WIDTHS[name] - len(value))) for name, value in values.items()}


def feature(value: np.ndarray) -> tf.train.Feature:
    if value.dtype == np.float32:
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))


def main() -> None:
    samples = edge_samples()
    rows = [padded(samples, row) for row in range(len(samples))]
    with tf.io.TFRecordWriter(str(TARGET)) as writer:
        for row in rows:
            features = tf.train.Features(feature={name: feature(value) for name, value in row.items()})
            writer.write(tf.train.Example(features=features).SerializeToString(deterministic=True))
    description = {
        name: tf.io.FixedLenFeature([width], tf.float32 if name == "masked_lm_weights" else tf.int64)
        for name, width in WIDTHS.items()
    }
    ours = open_shard(TARGET)
    assert len(ours) == len(rows)
    for index, record in enumerate(tf.data.TFRecordDataset(str(TARGET))):
        theirs = tf.io.parse_single_example(record, description)
        mine = padded(ours.read(index, index + 1), 0)
        for name in WIDTHS:
            assert np.array_equal(mine[name], theirs[name].numpy()), (index, name)
    print(
        f"{TARGET.name}: {len(rows)} records, {TARGET.stat().st_size:,} bytes, read alike by TensorFlow {tf.__version__}"
    )


if __name__ == "__main__":
    main()
