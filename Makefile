# Two commands matter: `make train` and `make test`. Each makes .venv first, with pinned versions.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # tests start a thousand processes, which read compiled modules 0.2 s faster

.PHONY: train test ops test-long test-changed test-versions test-hybrid test-engine-layers test-backends test-clients test-trainers test-pythons releases feature test-triton test-npu-contract test-deepspeed lint bench compare docs pages site release changelog clean

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

ops: $(VENV)/installed  ## the C++ operators, compiled once; without a compiler the references run
	$(BIN)/mindspeed ops build --optional

train: $(VENV)/installed  ## train a small GPT on real text over two processes, then compile the operators for later runs
	$(BIN)/mindspeed pretrain -f examples/pretrain_gpt.yaml --nproc 2
	$(BIN)/mindspeed ops build --optional

test: ops  ## every test that belongs in a default run
	$(BIN)/python -m pytest -q -m "not long" -n 3 --dist loadfile

LONG ?= tests

test-long: ops  ## the long tests, of tables a cover; EXHAUSTIVE=1 takes every row, SPLITS=4 GROUP=1 a quarter; what has passed on this source is not run again
	$(BIN)/python -m pytest -q -m long -n 3 --dist loadfile --resume $(if $(EXHAUSTIVE),--exhaustive) $(if $(SPLITS),--splits $(SPLITS) --group $(GROUP)) -o console_output_style=count $(LONG)

SINCE ?= main

test-changed: ops  ## the tests of the default run that changes since SINCE can reach
	tests=$$($(BIN)/python -m tests.changed $(SINCE)) && if [ -n "$$tests" ]; then $(BIN)/python -m pytest -q -m "not long" $$tests; fi

MEGATRONS := 0.14.0 0.15.0 0.15.3 0.16.0

build/megatron/%/installed: | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --upgrade --target $(@D) megatron-core==$*
	touch $@

test-versions: $(VENV)/installed $(MEGATRONS:%=build/megatron/%/installed)  ## the features on the other Megatron versions, and on the checkouts in MINDSPEED_MEGATRONS
	MINDSPEED_MEGATRONS=build/megatron:$(MINDSPEED_MEGATRONS) $(BIN)/python -m pytest -q -m long tests/megatron/versions
	$(BIN)/python -m tools.docs.results versions build/versions
	$(BIN)/python -m tools.docs.results bugs build/bugs

test-hybrid: $(VENV)/installed  ## the features on Megatron's HybridModel, with the Megatrons from 0.19 on in MINDSPEED_MEGATRONS
	-$(BIN)/python -m pytest -q -m long tests/megatron/versions/test_hybrid.py
	$(BIN)/python -m tools.docs.results versions build/hybrid

test-engine-layers: $(VENV)/installed  ## the features on layers in the roles of Transformer Engine's
	-$(BIN)/python -m pytest -q -m long tests/features/transformer_engine_layers/test_every_feature.py
	$(BIN)/python -m tools.docs.results engine build/engine_layers

test-backends: $(VENV)/installed  ## the features by the rules of NCCL and HCCL
	-$(BIN)/python -m pytest -q -m "long or not long" tests/features/test_backend_rules.py
	$(BIN)/python -m tools.docs.results backends build/backends

CLIENTS := tests/features/transformer_engine_layers/clients.txt

build/clients/installed: $(CLIENTS) | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $(CLIENTS)
	touch $@

test-clients: build/clients/installed  ## packages that build Transformer Engine's layers, and the frameworks in MINDSPEED_CONSUMERS
	MINDSPEED_CLIENTS=build/clients $(BIN)/python -m pytest -q -m long $(addprefix tests/features/transformer_engine_layers/,test_clients.py test_frameworks.py)

TRAINERS := tests/nn/trainers.txt

build/trainers/installed: $(TRAINERS) | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $(TRAINERS)
	touch $@

test-trainers: build/trainers/installed  ## the examples with transformers, Accelerate and torchtitan
	MINDSPEED_TRAINERS=build/trainers $(BIN)/python -m pytest -q -m long tests/nn/test_other_trainers.py

PYTHONS := 3.10 3.12 3.13
MINDSPEED_PYTHONS ?= build/pythons

build/pythons/%/installed: pyproject.toml constraints.txt
	if python$* --version >/dev/null 2>&1; then \
	  test -x $(@D)/bin/python || python$* -m venv $(@D); \
	  $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 && \
	  $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && touch $@; \
	else echo "no python$* that starts on PATH: it is not tested"; fi

test-pythons: $(VENV)/installed $(MEGATRONS:%=build/megatron/%/installed) $(if $(filter build/pythons,$(MINDSPEED_PYTHONS)),$(PYTHONS:%=build/pythons/%/installed))  ## the other Pythons, with the Megatron versions that take them; MINDSPEED_PYTHONS names ready environments
	MINDSPEED_PYTHONS=$(MINDSPEED_PYTHONS) MINDSPEED_MEGATRONS=build/megatron:$(MINDSPEED_MEGATRONS) $(BIN)/python -m pytest -q -m long tests/pythons
	$(BIN)/python -m tools.docs.results pythons build/python-results

RECORDED := 0.12.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.1
record = $(patsubst %/installed,$(BIN)/mindspeed patches record --megatron % &&,$(1)) true

releases: $(RECORDED:%=build/megatron/%/installed)  ## record every patch target again, in each recorded megatron-core
	$(call record,$^)

KIND ?= patch
FOLDER := $(subst -,_,$(NAME))

feature: $(VENV)/installed  ## NAME=my-feature: scaffold it (KIND=patch, hook or op), record its targets, test it
	$(if $(NAME),,$(error give the name of the feature: make feature NAME=my-feature))
	test -d mindspeed/features/$(FOLDER) || $(BIN)/mindspeed features new $(NAME) --kind $(KIND)
	$(BIN)/mindspeed patches record
	$(call record,$(wildcard $(RECORDED:%=build/megatron/%/installed)))
	$(BIN)/python -m pytest -q -m "not long" tests/features/$(FOLDER)
	$(BIN)/mindspeed features test $(NAME)

build/triton/installed: | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) triton==3.9.0
	touch $@

test-triton: export PYTHONPATH := build/triton
test-triton: export MINDSPEED_OPS := reference
test-triton: export TRITON_CACHE_DIR := build/triton/cache
test-triton: export TRITON_DEFAULT_FP_FUSION := 1
test-triton: $(VENV)/installed build/triton/installed  ## the kernels of CUDA: interpreted on the CPU, then compiled for a GPU
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --confcutdir=tests/ops tests/ops/triton
	$(BIN)/python -m pytest -q --confcutdir=tests/ops tests/ops/triton

DEEPSPEED := 0.19.8

build/deepspeed/installed: | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D)/site einops hjson msgpack py-cpuinfo ninja
	DS_ACCELERATOR=cpu $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary deepspeed -d $(@D) deepspeed==$(DEEPSPEED)
	tar xzf $(@D)/deepspeed-$(DEEPSPEED).tar.gz -C $(@D)
	touch $@

test-deepspeed: export DS_ACCELERATOR := cpu
test-deepspeed: export PYTHONPATH := $(CURDIR)/build/deepspeed/deepspeed-$(DEEPSPEED):$(CURDIR)/build/deepspeed/site
test-deepspeed: $(VENV)/installed build/deepspeed/installed  ## the gate and the layer of deepspeed-moe against DeepSpeed's own
	$(BIN)/python -m tests.deepspeed_gate
	$(BIN)/python -m tests.deepspeed_layer

build/torch_npu/installed: | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) torch_npu==2.13.0
	touch $@

test-npu-contract: $(VENV)/installed build/torch_npu/installed  ## every call of torch_npu, held to the real one without an NPU
	$(BIN)/python -m tests.npu_contract build/torch_npu

lint: $(VENV)/installed  ## ruff, mypy, layers of imports, and the prose of every text that users read
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose

bench: ops  ## every row of the speed table, measured here
	$(BIN)/python -m benchmarks

compare: $(VENV)/installed  ## the framework beside the newest tag: fails where it takes more than 1.25 of its CPU time
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null) || { echo "no tag: there is nothing to compare the framework with"; exit 0; }; \
	rm -rf build/tag && mkdir -p build/tag && git archive "$$tag" mindspeed | tar x -C build/tag && \
	echo "compared with $$tag" && $(BIN)/python -m benchmarks compare build/tag

docs: $(VENV)/installed  ## what is printed and measured, in the pages that are written by hand
	$(BIN)/python -m tests.transcripts
	$(BIN)/python -m benchmarks page
	$(BIN)/python -m tools.docs.catalogue

pages: $(VENV)/installed  ## every page in build/pages: the guides, and what is made from the code
	$(BIN)/python -m tools.docs.site build/pages

build/tools/%/installed: tools/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

site: pages build/tools/site/installed  ## the site in build/site, strictly and without network; SERVE=1 serves it at localhost:8000
	build/tools/site/bin/mkdocs $(if $(SERVE),serve,build --strict --quiet) -f build/mkdocs.yml

release: pages build/tools/release/installed  ## sdist and wheel with every page in dist/, checked, and tried in a new environment
	build/tools/release/bin/python -m tools.release

changelog: build/tools/release/installed  ## VERSION=0.3.0: the fragments of changelog.d/ become a section of CHANGELOG.md
	build/tools/release/bin/towncrier build --yes --version $(or $(VERSION),$(error give the version: make changelog VERSION=0.3.0))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
