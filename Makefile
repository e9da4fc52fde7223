# From an empty machine `make demo` and `make test` each do all their own set-up. A second call
# installs nothing; a changed requirements file installs again.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime-installed
DEVELOPMENT := $(VENV)/.development-installed
SOURCES := orthros_train evaluation launchers tools benchmarks tests
TYPED := orthros_train evaluation launchers tools benchmarks

# Ranks, test workers and data workers share the cores: one thread each unless the caller says otherwise.
export OMP_NUM_THREADS ?= 1
# Passed on to the command: make demo DEMO="--seeds 42,43,44", make test PYTEST="tests/model -x"; DEMO also to demo-convert
DEMO ?=
PYTEST ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-convert test lint evidence evidence-performance bench bench-gpu cluster-packages clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo      real text, both arms trained small, evaluated, reported (outputs/demo/report.html)'
	@echo 'make demo-convert  a pretrained Llama becomes an Orthros and is adapted (outputs/demo-convert/report.html)'
	@echo 'make test      ruff, mypy and the test suite'
	@echo 'make lint      ruff and mypy alone'
	@echo 'make bench     the benchmarks, a quarter of an hour; results under outputs/benchmarks'
	@echo 'make bench-gpu the benchmarks of the 1.3B and 8B shapes, on a GPU'
	@echo 'make evidence  long tests and benchmarks; results with command and commit under docs/evidence'
	@echo 'make evidence-performance  the benchmarks that docs/performance.md watches, on a quiet machine; kept there, too'
	@echo 'make cluster-packages  as root on Debian: SLURM for the tests that start a cluster on this machine'
	@echo 'make clean     remove caches and outputs/demo (other outputs are left alone)'

demo: $(RUNTIME)
	$(RUN) tools/demo.py $(DEMO)

demo-convert: $(RUNTIME)
	$(RUN) tools/demo_convert.py $(DEMO)

test: lint
	$(RUN) -m pytest -m 'not evidence' $(PYTEST)

lint: $(DEVELOPMENT)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(TYPED)

BENCH := outputs/benchmarks
bench: $(RUNTIME)
	$(RUN) benchmarks/startup.py --output $(BENCH)/startup.json --repeats 3
	$(RUN) benchmarks/prefill.py --output $(BENCH)/prefill.json --lengths 1024,4096,16384
	$(RUN) benchmarks/training_step.py --output $(BENCH)/training_step.json --repeats 3 --peak-memory
	$(RUN) benchmarks/training_step.py --output $(BENCH)/packed_step.json --repeats 3 --uses pt --conversations 8
	$(RUN) benchmarks/decode.py --output $(BENCH)/decode.json --contexts 2048,32768 --batches 1,2 --steps 16
	$(RUN) benchmarks/data_loading.py --output $(BENCH)/data_loading.json
	$(RUN) benchmarks/checkpoint.py --output $(BENCH)/checkpoint.json
	$(RUN) benchmarks/preprocessing_speed.py --output $(BENCH)/preprocessing_speed.json --repeats 1
	$(RUN) benchmarks/base_stream_memory.py --output $(BENCH)/base_stream_memory.json
	$(RUN) benchmarks/scoring_speed.py --output $(BENCH)/scoring_speed.json --documents 8

# Without a GPU the first line says so. KERNEL is our arms' attention kernel.
KERNEL ?= auto
ON_GPU = --dtype bf16 --device cuda --attention-kernel $(KERNEL)
bench-gpu: $(RUNTIME)
	$(RUN) benchmarks/training_step.py --output $(BENCH)/gpu_training_step.json $(ON_GPU) \
	  --config configs/orthros_1.3b.yaml --uses pt --length 4096 --rows 2 --optimizer --profile
	$(RUN) benchmarks/training_step.py --output $(BENCH)/gpu_compiled_step.json $(ON_GPU) --compile \
	  --config configs/orthros_1.3b.yaml --uses pt --length 4096 --rows 2 --optimizer --profile
	$(RUN) benchmarks/training_step.py --output $(BENCH)/gpu_packed_step.json $(ON_GPU) \
	  --config configs/orthros_1.3b.yaml --uses pt --length 4096 --rows 2 --conversations 8 --optimizer --profile
	$(RUN) benchmarks/decode.py --output $(BENCH)/gpu_decode.json $(ON_GPU) \
	  --config configs/orthros_1.3b.yaml --contexts 4096,32768 --batches 1 --profile
	$(RUN) benchmarks/prefill.py --output $(BENCH)/gpu_prefill.json $(ON_GPU) \
	  --config configs/orthros_1.3b.yaml --lengths 4096,32768 --profile
	$(RUN) -m evaluation.ttft --output outputs/gpu_ttft.json $(ON_GPU) \
	  --config configs/llama3.1_8b_conversion.yaml --prompt-lengths 8192,32768,131072

# One file of evidence a part of the tests, so that a part can be run again by itself: make evidence-training
EVIDENCE := benchmarks conversion data evaluation launchers model parallel readme tools training
evidence: $(EVIDENCE:%=evidence-%) evidence-base-stream-memory evidence-performance

evidence-base-stream-memory: $(DEVELOPMENT)
	$(RUN) benchmarks/record_evidence.py base_stream_memory -- \
	  $(RUN) benchmarks/base_stream_memory.py --output docs/evidence/base_stream_memory.json

# The figures that docs/performance.md watches, for a machine that does nothing else
PERFORMANCE := prefill long_prefill training_step training_memory logits_memory decode scoring_speed data_loading startup
performance_prefill = prefill.py --lengths 1024,4096,16384,32768 --repeats 5
performance_long_prefill = prefill.py --arms orthros --lengths 32768,65536,131072 --peak-memory
performance_training_step = training_step.py --uses pt,sft
performance_training_memory = training_step.py --length 4096 --repeats 1 --peak-memory
performance_logits_memory = training_step.py --length 4096 --repeats 1 --peak-memory --all-logits
performance_decode = decode.py --contexts 2048,32768 --batches 1
performance_scoring_speed = scoring_speed.py
performance_data_loading = data_loading.py
performance_startup = startup.py
evidence-performance: $(PERFORMANCE:%=evidence-performance-%)

$(PERFORMANCE:%=evidence-performance-%): evidence-performance-%: $(DEVELOPMENT)
	$(RUN) benchmarks/record_evidence.py performance_$* -- \
	  $(RUN) benchmarks/$(performance_$*) --output docs/evidence/performance_$*.json

$(EVIDENCE:%=evidence-%): evidence-%: $(DEVELOPMENT)
	$(RUN) benchmarks/record_evidence.py tests_$* -- \
	  $(RUN) -u -m pytest $(if $(wildcard tests/$*),tests/$*,tests/test_$*.py) -m evidence -v $(PYTEST)

# What the tests in tests/launchers need to start a SLURM cluster on this machine. Without it they are skipped.
CLUSTER_PROGRAMS := slurmctld slurmd sbatch munged ip
CLUSTER_PACKAGES := slurmctld slurmd slurm-client munge libpmix-dev iproute2

cluster-packages:
	@if command -v $(CLUSTER_PROGRAMS) > /dev/null && [ $$(command -v $(CLUSTER_PROGRAMS) | wc -l) = $(words $(CLUSTER_PROGRAMS)) ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(CLUSTER_PACKAGES) > /dev/null \
	    || echo 'SLURM could not be installed: the tests that start a cluster are skipped'; \
	else echo 'SLURM is not installed and this is not root on Debian: the tests that start a cluster are skipped'; fi

clean:
	rm -rf outputs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed; name one with make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements.txt pyproject.toml | $(RUN)
	@echo 'Installing the requirements; the first time takes some minutes.'
	$(RUN) -m pip install --quiet --requirement requirements.txt
	$(RUN) -m pip install --quiet --no-deps --editable .
	@touch $@

$(DEVELOPMENT): requirements-dev.txt $(RUNTIME)
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt
	@touch $@
