"""Llama-family folders to Orthros folders and back.

* Nothing is trained or approximated: a weight that both sides have is the same bits on both.
* Tensors stream one by one; memory holds one output shard, whatever the size of the model.
* A key of config.json that is neither used nor known to be harmless is an error that names it.
"""
