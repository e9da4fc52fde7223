"""What a run would need, before it starts: nothing here allocates a model or talks to other ranks.

stage_plan.py               the stages that a layout cuts the model into, and what a rank of each holds
memory_estimate.py          bytes of a rank, by part
communication_estimate.py   bytes that a rank sends, and the pipeline's bubble
dry_run.py                  all of it as tables
layout_search.py            the layouts that fit a GPU, fastest first
"""
