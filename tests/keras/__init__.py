"""Tests of rulec.keras on one backend of Keras: that of KERAS_BACKEND, or torch. A slow test runs them on the other."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
