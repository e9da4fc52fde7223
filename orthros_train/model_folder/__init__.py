"""What a Hugging Face folder holds: looked at before anything is loaded, and read tensor by tensor or in parts.

json_files.py         config.json and the index of shards
tensor_folder.py      the tensors, their shapes and dtypes, and parts of them
weights.py            them loaded into a whole model
model_parameters.py   whether they are the parameters that a configuration calls for
"""
