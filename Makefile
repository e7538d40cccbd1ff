# The front door. Every target sets up what it needs and does only what has changed since the last time.
#
#   make          builds the engine and installs the package into .venv
#   make demo     the main job: train, save, be killed, resume exactly; a table and out/demo.png
#   make demo-studio  a job trains, is killed and resumes while `nebula studio` shows it; PICTURES=docs makes the pictures of docs/operate.md
#   make demo-elastic  a job that loses node 0 and regains a node, beside an undisturbed one; out/demo-elastic.png
#   make test     everything: linters, C and Python tests, sanitizers, a short selection with each framework
#   make check    what everyday work needs, in under 4 minutes: linters, the C tests, the package, its main promises
#   make affected  the tests of what a change touches, in under 4 minutes; BASE=main: since that commit
#   make nightly  all tests in their long forms
#   make faults-long  1,000 transfers with faults for each object store, and the promises of all stores on several buckets
#   make test-frameworks   all versions of DeepSpeed, Lightning, Hugging Face and DCP; sets up an environment for each. NEBULA_TEST_STORAGE=s3, azure,
#                          adls or gs: on an object store of this machine
#   make test-localstack   the tests of S3 with LocalStack in place of moto
#   make test-oldest   the Python tests with the oldest torch that the package allows
#   make test-newest   the Python tests, and those of DCP and of a training loop, with a newer torch than that of the other tests
#   make newest   the frameworks' newest versions that the registry has, and what broke; for a weekly job. ARGS="hf lightning": these
#   make bench    against other ways to save; QUICK=1 for a short look
#   make bench-peers  against every other engine that runs on CPUs, each in an environment of its own
#   make bench-gpu    of tensors on a GPU, where there is one
#   make bench-stores  transfers to an object store on this machine, beside other clients, and jobs that persist to one
#   make bench-scale  a job of many nodes on one machine: how soon versions are committed, durable, replicated, and found after a loss; and what a save costs beside many versions, files and jobs
#   make bench-publish  how soon followers have the weights that a trainer publishes, beside other projects; they come from PyPI and GitHub
#   make bench-jax  saves and loads of JAX's arrays, beside Orbax
#   make bench-mpi  a mini-app of MPI, beside VELOC and SCR
#   make bench-mlperf  the checkpoint workload of MLPerf Storage, beside its own writers
#   make bench-recover  from a failure of a worker or a node to the next step
#   make bench-frameworks  what a framework's own save call blocks, with Nebula and as it comes
#   make docs     the guides and a reference as pages, in out/docs; fails for a link that leads nowhere
#   make wheels   wheels for others, in dist/; ARCH=aarch64 for that machine (scripts/wheels.sh)
#   make deb      Debian packages of the command and of libnebula, for this release of Debian, in dist/ (scripts/deb.sh)
#   make spack    Spack installs libnebula by its recipe, and programs are built with it and resume (scripts/spack.sh)
#   make conda    rattler-build builds and installs the recipe of conda, and programs run with it; CHANNEL=conda-forge (scripts/conda.sh)
#   make cleanroot  tries them on a system with Python and nothing else, as root (scripts/cleanroot.sh)
#   make emulated   C tests for aarch64, under qemu (scripts/emulated.sh)
#   make soak     a job that fails all the time, and what grows; ARGS="--minutes 60"
#   make fuzz     each parser searches for inputs that break it, an hour of CPU time each; ARGS="--minutes 5 manifest"
#   make partition  32 nodes of 8 ranks in network namespaces, half of which is cut off, as root
#   make mutants  changes the rules of commit, removal and retention, and looks whether a test notices; ARGS="--count 200 --seed 3"
#   make asan     the C tests under the address and undefined-behaviour sanitizers
#   make tsan     the C tests under the thread sanitizer
#   make analyze  clang's static analyzer
#   make coverage how much of the C half its own tests execute, and which error paths none of them takes
#   make lint     ruff, warnings of gcc and clang, the rules of the house
#   make clean    removes what was built; `make distclean` the environment as well

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := package
MAKEFLAGS += --no-print-directory
.PHONY: soak fuzz partition mutants docs wheels deb spack conda cleanroot emulated package demo demo-studio demo-elastic test-studio check test test-frameworks test-localstack test-oldest test-newest newest test-suites bench bench-first bench-peaks bench-loads bench-peers bench-gpu bench-frameworks bench-scale bench-publish bench-recover bench-jax bench-mpi bench-mlperf bench-stores faults-long nightly affected asan asan-build tsan lint units clean distclean environments servers setup setup-test analyze coverage
.DELETE_ON_ERROR:
# Builds use all cores by themselves; two at once only mix their output.
.NOTPARALLEL:

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONPATH
# A module is compiled when it is first imported, and kept. Most of those that pip installs never are. Images of containers forbid Python to keep
# them: each process would then compile all of torch, which takes longer than most tests.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
NATIVE_FILES := $(shell find src include python meson.build meson.options pyproject.toml -type f -not -name '*.pyc')
INSTALLED := .venv/.installed
LIMITS := build/bench-limits
# Four C tests for each core: they wait for most of their time.
export MESON_TESTTHREADS ?= $(shell echo $$((4 * $$(nproc))))
PYTEST := $(BIN)/python -m pytest --timeout=300 -rs --no-header
FRAMEWORKS := $(basename $(notdir $(wildcard requirements/frameworks/*.txt)))
TORCHES := $(shell ls requirements/frameworks | sed -n 's/^\(torch-.*\)\.txt$$/\1/p' | sort -V)
OLDEST := $(firstword $(TORCHES))
NEWEST := $(lastword $(TORCHES))
SHORT_FRAMEWORKS := deepspeed-0.19.8 lightning hf jax
# Of the frameworks' tests, what `make test` has time for: each framework killed, resumed, and read by its own tools.
SHORT_TESTS := after_sigkill or two_nodes_resume or stock_tools or directory_appears or published_path

setup:
	@scripts/setup.sh
setup-test:
	@scripts/setup.sh test

# The wheel's own build directory is kept, so that a second build compiles what has changed. Warnings are errors in `make lint` and in CI, not here: another
# compiler than ours must not keep anybody from using the package.
$(INSTALLED): $(NATIVE_FILES) | setup
	@echo "build: the package nebulaml"
	@pip uninstall -q -y nebulaml 2>/dev/null || true # the distribution's name before 0.2.0
	@pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
		--config-settings=build-dir=build/python --config-settings=setup-args=-Dwerror=$(if $(CI),true,false) . || { rm -rf build/python; exit 1; }
	@touch $@
package: setup $(INSTALLED)

demo: package
	@$(BIN)/python -m demo $(ARGS)

demo-studio: package
	@scripts/studio.sh $(if $(PICTURES),browser)
	@.envs/studio/bin/python -m demo.studio $(if $(PICTURES),--pictures $(PICTURES)) $(ARGS)

demo-elastic: package
	@$(BIN)/python examples/elastic-cifar/nodes.py --plot out/demo-elastic.png $(ARGS)

$(LIMITS): bench/limits.c src/sum/sum.h $(wildcard src/sum/*.c) | setup
	@scripts/build.sh build
	@$${CC:-cc} -std=gnu17 -O2 -Wall -Wextra -D_GNU_SOURCE -Isrc -Iinclude -o $@ bench/limits.c build/src/libnb_core.a -pthread
bench: package $(LIMITS)
	@$(BIN)/python -m bench $(if $(QUICK),--quick) $(ARGS)

bench-first: package
	@$(BIN)/python -m bench.first_saves $(ARGS)

bench-peaks: package
	@$(BIN)/python -m bench.peaks $(ARGS)

bench-loads: package
	@$(BIN)/python -m bench.loads $(if $(QUICK),--quick) $(ARGS)

bench-peers: package $(LIMITS)
	@scripts/peers.sh
	@$(BIN)/python -m bench.compare $(ARGS)

bench-gpu: package
	@$(BIN)/python -m bench.gpu $(ARGS)

bench-stores: package
	@scripts/peers.sh stores
	@[[ -f build-bench/build.ninja ]] || meson setup build-bench -Dpython=false -Dbenchmarks=true >/dev/null
	@ninja -C build-bench --quiet bench/bench-sink bench/bench-transfer
	@$(BIN)/python -m bench.stores $(if $(QUICK),--quick) $(ARGS)

bench-publish: package
	@scripts/peers.sh torch-checkpointing torchstore stitch checkpoint-engine
	@$(BIN)/python -m bench.publish $(ARGS)

bench-jax: package .envs/jax/.ready
	@$(BIN)/python -m bench.jax_trees $(ARGS)

bench-mpi: setup-test package
	@scripts/mpi_peers.sh
	@$(BIN)/python -m bench.mpi $(ARGS)

bench-mlperf: setup-test package
	@scripts/framework.sh mlperf
	@scripts/moto.sh run $(CURDIR)/$(BIN)/python -m bench.mlperf $(ARGS)

bench-recover: package
	@$(BIN)/python -m bench.recover $(ARGS)

bench-scale: package
	@$(BIN)/python -m bench.nodes --nodes 32 --ranks 8
	@$(BIN)/python -m bench.nodes --nodes 128 --ranks 8
	@$(BIN)/python -m bench.nodes --nodes 16 --ranks 8 --replicas 1 --lose 2
	@[[ -f build/build.ninja ]] || scripts/build.sh build
	@ninja -C build --quiet tests/unit/cli/make_version
	@$(BIN)/python -m bench.growth $(ARGS)

bench-frameworks: package $(patsubst %,.envs/%/.ready,$(SHORT_FRAMEWORKS))
	@$(BIN)/python -m bench.frameworks $(ARGS)

lint: setup-test
	@scripts/lint.sh
	@scripts/build.sh build

units: setup-test
	@scripts/build.sh build
	@meson test -C build --print-errorlogs --no-rebuild --timeout-multiplier 2 $(SUITES)

faults-long: setup-test
	@scripts/build.sh build
	@meson test -C build --print-errorlogs --no-rebuild --setup long --suite long --verbose

# The build of clang, and so of its warnings. -O0 -g1 compiles in a third of the time of -O2 -g, and the tests wait for more than they compute.
# SKIPPED: suites whose tests are not built.
asan-build: setup-test
	@CC=clang TARGETS="$(if $(SKIPPED),src/nebula)" scripts/build.sh build-asan -Db_sanitize=address,undefined -Doptimization=0 -Dc_args=-g1
	@[[ -z "$(SKIPPED)" ]] || ninja -C build-asan --quiet $$($(BIN)/python scripts/test_programs.py build-asan $(SKIPPED))
asan: asan-build
	@meson test -C build-asan --print-errorlogs --no-rebuild --timeout-multiplier 4 $(SUITES)

# Cuts the power below real agents and trainers. `make power ARGS="--cuts 200 --on ext4,ext4-writeback,xfs,btrfs"`: on real file systems.
power: setup-test package
	@scripts/build.sh build
	@ninja -C build --quiet tests/power/powerfs
	@$(BIN)/python tests/power/power.py $(ARGS)

soak: package
	@$(BIN)/python tests/campaign/soak.py $(ARGS)
fuzz: setup-test
	@$(BIN)/python tests/campaign/fuzz.py $(ARGS)
partition: package
	@$(BIN)/python tests/campaign/partition.py $(ARGS)
	@$(BIN)/python tests/campaign/read_once.py
mutants: package
	@$(BIN)/python tests/mutation/mutate.py $(ARGS)

# An agent that ends does not wait for a thread that hangs in storage: that is no leak.
tsan: setup-test
	@scripts/build.sh build-tsan -Db_sanitize=thread
	@TSAN_OPTIONS='report_thread_leaks=0 atexit_sleep_ms=0 suppressions=$(CURDIR)/tests/tsan.supp' meson test -C build-tsan --print-errorlogs --no-rebuild --timeout-multiplier 8 --no-suite fuzz

analyze: setup-test
	@scripts/build.sh build
	@scripts/analyze.sh build

# The tests in Python run most of src/cli, and do not count here. The floor is a point below the figures of docs/reliability.md, and rises with them.
coverage: setup-test
	@scripts/build.sh build-coverage -Db_coverage=true -Doptimization=0 -Dwerror=false
	@find build-coverage -name '*.gcda' -delete
	@meson test -C build-coverage --print-errorlogs --no-rebuild --timeout-multiplier 4 --no-suite stores
	@$(BIN)/python scripts/coverage.py build-coverage --floor 71 45

# In order, so that what is quick to fail comes first. The C tests are built and run once, with the sanitizers, except for those on emulators,
# whose servers take the time, and those of the suites `large`, `fault` and `crash`, which would take minutes: `make units` runs all without,
# and compiles them with the warnings of gcc, and `make nightly` runs all with the sanitizers. These few, and what the tests in Python need of
# C, are built in build-test, with little optimization, in 40 % of the time. The frameworks and, beside them, the servers are fetched while
# the C half is built and tested, which the network decides. The tests on emulators wait most of their time, so the tests in Python run beside
# them. Each phase says when it begins, and whether the one before it has left cores idle.
# The first import of a module compiles it: here, while the C tests leave cores idle. Later, several processes would at the same time.
MODULES := torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.run, torch._inductor.compile_fx, matplotlib.pyplot, pytest, hypothesis
environments: $(SHORT_FRAMEWORKS:%=.envs/%/.ready)
	@$(BIN)/python -c 'import $(MODULES)'
	@.envs/lightning/bin/python -c 'import lightning.pytorch, lightning.fabric'
	@.envs/hf/bin/python -c 'import transformers.trainer, accelerate'
	@.envs/jax/bin/python -c 'import jax, flax, optax, orbax.checkpoint'
	@.envs/deepspeed-0.19.8/bin/python -c 'import deepspeed'
servers:
	@scripts/azurite.sh install || test $$? = 77
	@scripts/moto.sh install
	@scripts/studio.sh browser || test $$? = 77
PLAIN_SUITES := stores large fault crash
PLAIN := tests/unit/client_test tests/unit/cow_test tests/unit/sleeping_test tests/unit/store/large_manifest_test \
	$(basename $(wildcard tests/fault/*_test.c tests/crash/*_test.c))
test: setup-test
	@export NEBULA_BUILD_DIR=$(CURDIR)/build-test; log=$$(mktemp -d); { $(MAKE) servers & servers=$$!; $(MAKE) environments && wait $$servers; } >$$log/fetched 2>&1 & fetching=$$!; stores= collecting=; \
	trap 'kill $$fetching $$stores $$collecting 2>/dev/null || true; rm -rf $$log' EXIT; \
	phase() { scripts/phase.sh $$log/phases "$$1"; }; \
	phase "linters, and the C half"; \
	scripts/lint.sh; \
	TARGETS="all $(PLAIN)" scripts/build.sh $$NEBULA_BUILD_DIR -Doptimization=1 -Dc_args=-g1; \
	phase "the C half with sanitizers"; \
	$(MAKE) asan-build SKIPPED="$(PLAIN_SUITES)"; \
	phase "the package"; \
	$(MAKE) package; \
	phase "C tests"; \
	scripts/tests.sh collect & collecting=$$!; \
	$(MAKE) asan SKIPPED="$(PLAIN_SUITES)" SUITES="$(PLAIN_SUITES:%=--no-suite %)"; \
	phase "what is still being fetched"; \
	wait $$collecting; \
	wait $$fetching || { cat $$log/fetched; exit 1; }; \
	phase "Python tests, and stores"; \
	{ MESON_TESTTHREADS=3 meson test -C $$NEBULA_BUILD_DIR --print-errorlogs --no-rebuild $(PLAIN_SUITES:%=--suite %) $(if $(NEBULA_TEST_NIGHTLY),,--no-suite night) && \
	meson test -C $$NEBULA_BUILD_DIR --print-errorlogs --no-rebuild client_test; } >$$log/stores 2>&1 & stores=$$!; \
	scripts/tests.sh "commit_model or storage_model or $(SHORT_TESTS)" $(ARGS) | tee $$log/python || failed=1; \
	phase "the end of the stores"; \
	wait $$stores || { cat $$log/stores; failed=1; }; \
	phase "the end"; \
	grep -A 8 '^Ok:' $$log/stores || true; \
	tail -n 1 $$log/python; \
	[[ -z $${failed-} ]]

# All that a release has to pass, for a night. `make test-frameworks` and those below it add environments of their own.
nightly:
	@NEBULA_TEST_NIGHTLY=1 $(MAKE) units asan test SHORT_TESTS="$(SHORT_TESTS) or short_form"
	@$(MAKE) soak partition ARGS=
	@$(MAKE) mutants ARGS="--count 100 --seed $$(date +%j)"
	@$(MAKE) tsan analyze coverage faults-long test-oldest test-newest test-frameworks
	@$(MAKE) fuzz ARGS=

# The tests of what has changed since BASE (the last commit), the faults, the crashes and one kill.
affected: setup-test
	@$(MAKE) lint package
	@$(BIN)/python scripts/affected.py $(BASE)

# The page of `nebula studio`, in a browser.
test-studio: package
	@scripts/studio.sh browser
	@.envs/studio/bin/python -m pytest --timeout=300 -rs --no-header tests/studio $(ARGS)

# The promises that a change breaks most often, in files whose tests wait for nothing.
CHECKED := $(foreach t,api values alias image pickling load_into dense history durability_doc settings_doc,tests/python/test_$(t).py)
check: setup-test
	@$(MAKE) lint units package SUITES="--no-suite stores"
	@$(PYTEST) -q $(CHECKED) $(ARGS)

# A framework's environment sees .venv's torch and nebulaml: every version is tried with the same build.
.envs/%/.ready: requirements/frameworks/%.txt | setup-test
	@scripts/framework.sh $*
# Those with another Python than .venv's have a build of their own.
$(patsubst requirements/frameworks/%.txt,.envs/%/.ready,$(shell grep -l '^# python: ' requirements/frameworks/*.txt)): $(NATIVE_FILES)
test-frameworks: package $(FRAMEWORKS:%=.envs/%/.ready)
	@NEBULA_TEST_NIGHTLY=1 NEBULA_TEST_FRAMEWORKS=all $(PYTEST) --timeout=900 tests/frameworks tests/integration/test_elastic_nodes.py $(ARGS)

test-localstack: package setup-test
	@scripts/localstack.sh install
	@scripts/build.sh build
	@meson test -C build --print-errorlogs --no-rebuild --setup long --suite localstack
	@NEBULA_TEST_S3=localstack $(PYTEST) tests/integration/test_object_stores.py tests/integration/test_ranges.py tests/integration/test_resumed.py \
		tests/integration/test_unchanged.py tests/integration/test_copy.py -k "s3 or buckets" $(ARGS)

# Their environments have another torch in front of .venv's. Tests of what that torch lacks are skipped, and say so.
test-oldest: package .envs/$(OLDEST)/.ready
	@.envs/$(OLDEST)/bin/python -m pytest --timeout=300 -rs --no-header tests/python $(ARGS)
test-newest: package .envs/$(NEWEST)/.ready
	@.envs/$(NEWEST)/bin/python -m pytest --timeout=300 -rs --no-header tests/python tests/frameworks/test_dcp.py tests/frameworks/test_loop.py $(ARGS)

newest: package
	@scripts/newest.sh $(ARGS)

# The frameworks' own checkpoint tests, with Nebula in place: scripts/suites.sh says of which, and where the others are to be had.
test-suites: package
	@scripts/suites.sh $(ARGS)

docs: setup
	@scripts/docs.sh

wheels:
	@scripts/setup.sh wheels
	@scripts/wheels.sh $(ARCH)
deb: setup
	@scripts/deb.sh
spack: setup
	@scripts/spack.sh
conda: setup
	@scripts/conda.sh $(CHANNEL)
emulated:
	@$(MAKE) wheels ARCH=aarch64
	@scripts/emulated.sh
cleanroot: setup-test wheels
	@scripts/cleanroot.sh $(RELEASES)

clean:
	rm -rf build dist build-bench build-clang build-asan build-tsan build-coverage build-fuzz build-test out $(INSTALLED) .pytest_cache .ruff_cache .hypothesis
distclean: clean
	rm -rf .venv build-wheels $(FRAMEWORKS:%=.envs/%) .envs/suite-*
