# Thin: each target is a line; the work is in tools/ and CMakePresets.json.

python = $$(tools/env)
sim = $(CURDIR)/build/release/python/ebbtide/libebbtide_sim.so

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r a b; do printf '  make %-13s %s\n' "$$a" "$$b"; done

demo: setup ## models larger than the VRAM, on your GPU or a simulated one; then a tour of the latter
	@python=$(python) && tools/build release && export PYTHONPATH=build/release/python && $$python -m ebbtide demo && $$python -m ebbtide tour

test: setup ## everything CI checks; what needs a GPU is skipped where there is none
	@python=$(python) && tools/test $$python

test-versions: setup ## the torch-facing tests on the oldest and the newest PyTorch
	@tools/test-versions

bench: setup ## benchmarks, on the simulated GPU
	@tools/build release && EBBTIDE_DRIVER=$(sim) tools/bench

test-gpu: ## the driver and GPU tests, with this machine's own Python; installs nothing
	@tools/gpu test

bench-gpu: ## benchmarks on the GPU, likewise
	@tools/gpu bench

env: setup ## prepare the Python environment and print its python (make -s env)
	@tools/env

format: setup ## let clang-format and ruff have their way
	@git ls-files --cached --others --exclude-standard '*.[ch]' | xargs clang-format -i
	@python=$(python) && $$python -m ruff format --quiet . && $$python -m ruff check --quiet --fix .

clean: ## forget what was built; the environment stays
	@rm -rf build dist

setup:
	@tools/setup

.PHONY: help demo test test-versions bench test-gpu bench-gpu env format clean setup
