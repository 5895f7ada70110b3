#!/usr/bin/env bash
# Keras's global_clipnorm and clipnorm under TensorFlow's MirroredStrategy, over logical devices of
# one processor. Their page: the norm is no higher than this value afterwards. tf.keras refused it,
# so as not to clip "in the wrong place" without a word (tensorflow #33929).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6

cat >"$folder/clip.py" <<'PYTHON'
import sys

import keras
import numpy
import tensorflow as tf

devices = int(sys.argv[1])
logical = [tf.config.LogicalDeviceConfiguration()] * devices
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)


def moved(**options):
    """How far one step with a rate of 1 moves the weights, of a batch of 8 equal samples."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{device}" for device in range(devices)])
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
        model = keras.Sequential([layer])
        model.compile(optimizer=keras.optimizers.SGD(1.0, **options), loss="mse")
    model.fit(numpy.ones((8, 4)), numpy.full((8, 1), 100.0), batch_size=8, verbose=0)
    return f"{numpy.linalg.norm(model.get_weights()[0]):.0f}"


if devices == 1:
    print("TensorFlow", tf.__version__, "Keras", keras.__version__)
print("devices:", devices, "step without clipping", moved(), end=", ")
print("with global_clipnorm=1", moved(global_clipnorm=1.0), "with clipnorm=1", moved(clipnorm=1.0))
PYTHON
export KERAS_BACKEND=tensorflow KERAS_HOME=$folder
seen=$(for devices in 1 2 4; do
  "$python" -W ignore "$folder/clip.py" "$devices" 2>>"$errors"
done)
verdict 'clipped to 1, a step with a rate of 1 has the norm 1, as the batch is the same' "$seen" \
  "TensorFlow 2.21.0 Keras 3.15.1
devices: 1 step without clipping 400, with global_clipnorm=1 1 with clipnorm=1 1
devices: 2 step without clipping 400, with global_clipnorm=1 2 with clipnorm=1 2
devices: 4 step without clipping 400, with global_clipnorm=1 4 with clipnorm=1 4"
