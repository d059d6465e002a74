# `make train` and `make test` set up what they need. See CONTRIBUTING.md.

RUN := .venv/bin/python
GPUS := 4
SCRIPTS := tools/*.sh tools/*.sbatch .ci/run

# The tests start hundreds of processes; without bytecode, each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-examples setup-dev data train text-data train-gpt test test-rest test-all lint format types docs clean

help:  ## Show this.
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

setup:  ## Make .venv with OneFlow and what training and the tests need.
	@bash tools/setup.sh test

setup-examples:
	@bash tools/setup.sh examples

setup-dev:
	@bash tools/setup.sh dev

data: setup-examples  ## Write the handwritten digits out as an image folder.
	$(RUN) tools/prepare_digits.py

train: data  ## Train a small vision transformer on the digits, on 4 CPU ranks.
	bash tools/train.sh tools/train_net.py configs/vit_digits.py $(GPUS) train.dist.tensor_parallel_size=2

STDLIB := data/stdlib

text-data: setup  ## Tokenize the source files of Python's standard library.
	$(RUN) tools/prepare_stdlib.py $(STDLIB)
	$(RUN) -m libai_data train-tokenizer --input $(STDLIB)/train.jsonl --output $(STDLIB)/tokenizer.json --vocab-size 2048
	for part in train test; do $(RUN) -m libai_data preprocess --input $(STDLIB)/$$part.jsonl \
	    --tokenizer $(STDLIB)/tokenizer.json --append-eod --output-prefix $(STDLIB)/$$part --workers 2 || exit; done
	$(RUN) tools/unigram.py $(STDLIB)/train_text_document $(STDLIB)/test_text_document

train-gpt: text-data  ## Train a small GPT on them, on 4 CPU ranks.
	bash tools/train.sh tools/train_net.py configs/gpt_stdlib.py $(GPUS) train.dist.tensor_parallel_size=2

test: setup  ## Run the tests to run before each commit.
	$(RUN) -m pytest -n 6

test-rest: setup  ## Run what `make test` leaves out: slow tests, and many examples of each property.
	$(RUN) -m pytest -n 8 -m "slow or hypothesis" --hypothesis-profile long

test-all: test test-rest  ## Run every test.

lint: setup-dev  ## Check style: ruff, and shellcheck for the scripts.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	.venv/bin/shellcheck $(SCRIPTS)

format: setup-dev  ## Put the code into the shape that lint wants.
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: setup-dev  ## Check types with mypy.
	$(RUN) -m mypy

docs: setup-dev  ## Build the documentation into site/, strictly.
	@NO_MKDOCS_2_WARNING=true $(RUN) -m mkdocs build --strict

clean:  ## Remove what was built; .venv, data and output stay.
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
