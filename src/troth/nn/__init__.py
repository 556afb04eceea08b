"""Ring 2: the parts families share: linear layers, rotary tables, attention, gated MLP, and the batch they compute."""
