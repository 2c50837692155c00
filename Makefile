# The one entry, for people and CI alike. `make` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup build guest libvirt uml demo test test-guests test-qos test-blktests test-full check fmt clippy doc deny fuzz loom \
	bench-strict bench-ssd bench-prediction bench-planner bench-closed-loop bench-iothreads \
	bench-dataplane bench-dataplane-isolation bench-dataplane-endurance bench-dataplane-footprint \
	bench-dataplane-syscalls bench-full bench-full-24 bench-full-raw bench-dataplane-verify \
	bench-dataplane-moves bench-dataplane-profile bench-monitor bench-qos \
	bench-qos-neighbours bench-qos-file bench-qos-cost bench-qos-changes bench-qos-admission \
	bench-full-qos bench-db bench-completion bench-full-completion bench-iocores bench-full-iocores \
	python test-python bench-campaign bench-full-campaign bench-conditions bench-full-conditions

# A fresh rustup is not yet on PATH.
export PATH := $(PATH):$(or $(CARGO_HOME),$(HOME)/.cargo)/bin

RTVIRTIO := $(or $(CARGO_TARGET_DIR),target)/release/rtvirtio
RESULTS ?= docs/results

# Every scheme, and those of which more than one repetition is made.
SCHEMES := bfq,ionice,rt-xen,none,mq-deadline,kyber,hand,rtvirtio
REPEATED := rtvirtio,hand
REPETITIONS ?= 3

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target text; do printf '  make %-18s %s\n' "$$target" "$$text"; done

setup: ## Install what is missing (Debian packages, as root), or say what to install
	@scripts/setup build

build: setup ## Build the release binary
	cargo build --release --locked -p rtvirtio -p rtvirtio-preload

# Where the guests' kernel and initramfs are kept.
GUEST := $(or $(CARGO_TARGET_DIR),target)/guest

guest: ## Kernel and initramfs for test guests, and QEMU (root)
	@scripts/guest $(GUEST)

# Where the tests' libvirt is kept.
LIBVIRT := $(or $(CARGO_TARGET_DIR),target)/libvirt

libvirt: ## libvirt 10 or later for tests: unpacked, not installed
	@scripts/libvirt $(LIBVIRT)

# Where the tests' User Mode Linux is kept.
UML := $(or $(CARGO_TARGET_DIR),target)/uml

uml: ## User Mode Linux for tests: unpacked, not installed
	@scripts/uml $(UML)

# Guests are for hosts whose KVM runs them, or for DEMO_FLAGS="--guests qemu".
demo: ## Baselines and rtvirtio side by side on a scratch disk: 3 min after the build (root; DEMO_FLAGS=...)
	@echo "demo: some 8 min on 2 cores with the build, 3 min without"
	@scripts/setup run
	@case "$$(ls /dev/kvm 2>/dev/null) $(DEMO_FLAGS)" in \
		*--guests\ cgroup*) ;; \
		/dev/kvm*|*--guests\ qemu*) scripts/guest $(GUEST) || echo "demo: without guests" ;; esac
	cargo build --release --locked -p rtvirtio -p rtvirtio-preload
	$(RTVIRTIO) demo --guest-image $(GUEST) $(DEMO_FLAGS)

test: setup ## The tests but those that boot guests and Python's: 10 min with the build; what a machine lacks is named
	@echo "test: some 10 min on 2 cores with the build; left to make test-full: guests and the Python package"
	RTVIRTIO_TEST_WITHOUT_GUESTS=1 cargo test --workspace --exclude rtvirtio-py --all-features --locked \
		--no-fail-fast

# The modules of tests/it that boot guests; `make test` names each test that it leaves out.
GUEST_TESTS := cgroup2:: guest:: guest_knobs:: libvirt:: nvme:: systemd:: \
	$(addprefix dataplane::,control crash device ioprio migration qemu uml) real_guest

test-guests: setup ## The tests that boot guests, by QEMU, libvirt and User Mode Linux: 10 min after make test
	@echo "test-guests: some 10 min on 2 cores"
	@scripts/guest $(GUEST) || echo "tests: without guests"
	@scripts/libvirt $(LIBVIRT) || echo "tests: without libvirt"
	@scripts/uml $(UML) || echo "tests: without User Mode Linux"
	cargo test --workspace --all-features --locked --no-fail-fast --test it -- $(GUEST_TESTS)

# Suites of others, each in a lane of its own: docs/results has what came of them.
SUITES := $(or $(CARGO_TARGET_DIR),target)

test-qos: build guest ## QEMU's own tests of vhost-user-blk (qos-test, from Debian's source package): 8 min at first (root)
	scripts/qos-test $(RTVIRTIO) $(SUITES)/qos-test $(RESULTS)/qos-test

test-blktests: build guest ## The kernel's blktests in a guest, on a disk of the data plane: 4 min at first (root)
	scripts/blktests $(RTVIRTIO) $(GUEST) $(SUITES)/blktests $(RESULTS)/blktests

test-full: test test-guests test-python ## All tests: make test, those that boot guests, and the Python package's

# The Python package, its environment and what its tests leave.
PYTHON_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target)/python)
PYTHON_BIN := $(PYTHON_DIR)/venv/bin

python: setup ## The Python package: its wheel, installed in an environment of its own
	@scripts/python $(PYTHON_DIR)
	@echo "wheel: $$(ls $(PYTHON_DIR)/wheels/*.whl), installed in $(PYTHON_DIR)/venv"

# Exit code 3 of scripts/python: no Python 3.11 or no package index here.
test-python: setup ## The Python package's tests, types, stubs and lints
	@scripts/python $(PYTHON_DIR) || { [[ $$? == 3 ]] || exit 1; echo "tests: without Python"; exit 0; }; \
		cd python; set -x; \
		$(PYTHON_BIN)/ruff format --check .; \
		$(PYTHON_BIN)/ruff check .; \
		$(PYTHON_BIN)/mypy rtvirtio tests; \
		cd ..; \
		$(PYTHON_BIN)/python -m mypy.stubtest rtvirtio._core; \
		$(PYTHON_BIN)/pytest -c python/pyproject.toml python/tests

# The parts of campaigns are large: they stay out of the repository, what they come to is in it.
CAMPAIGNS := target/campaign

bench-campaign: python ## Table II's grid in the simulator, 28,000 conditions; models, the 24 cases, figures: 55 min
	$(PYTHON_BIN)/python -m rtvirtio campaign table2 --out $(CAMPAIGNS)/table2
	$(PYTHON_BIN)/python -m rtvirtio campaign wide --out $(CAMPAIGNS)/wide
	$(PYTHON_BIN)/python -m rtvirtio campaign host --out $(CAMPAIGNS)/host
	$(PYTHON_BIN)/python -m rtvirtio campaign figures --out $(CAMPAIGNS)/figures
	$(PYTHON_BIN)/python -m rtvirtio train $(CAMPAIGNS)/table2 $(CAMPAIGNS)/wide $(CAMPAIGNS)/host \
		--shown $(CAMPAIGNS)/figures --profile $(RESULTS)/strict/profile.json \
		--cells $(RESULTS)/conditions/cells.jsonl $(RESULTS)/conditions-2/cells.jsonl --sizes --out $(CAMPAIGNS)/trained
	$(PYTHON_BIN)/python -m rtvirtio cases --profile $(RESULTS)/strict/profile.json \
		--model $(CAMPAIGNS)/trained/mlp.onnx --out $(CAMPAIGNS)/cases
	$(PYTHON_BIN)/python -m rtvirtio figures --campaign $(CAMPAIGNS)/figures --trained $(CAMPAIGNS)/trained \
		--cases $(CAMPAIGNS)/cases --cells $(RESULTS)/strict/cells.jsonl --out $(RESULTS)/campaign
	cp $(CAMPAIGNS)/trained/training.json $(CAMPAIGNS)/cases/cases.json $(CAMPAIGNS)/cases/table.txt \
		$(RESULTS)/campaign

$(CAMPAIGNS)/trained/mlp.onnx:
	$(MAKE) bench-campaign

bench-full-campaign: python $(CAMPAIGNS)/trained/mlp.onnx ## The 24 cases by the strict targets, beside a deep writer: 1 h
	$(PYTHON_BIN)/python -m rtvirtio cases --tier strict --neighbour writer --out $(CAMPAIGNS)/cases-strict \
		--profile $(RESULTS)/strict/profile.json --model $(CAMPAIGNS)/trained/mlp.onnx

check: setup fmt clippy doc deny fuzz ## All that a change must pass beside the tests

fmt: ## Formatting
	cargo fmt --all --check

clippy: ## Lints, of tests and benchmarks too
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings

doc: ## The documentation builds without a warning
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked

deny: ## Licences, sources and advisories of the dependencies
	@scripts/deny

loom: ## Every interleaving of the models of the live move, and of a completion's slot
	RUSTFLAGS="--cfg rtvirtio_loom" CARGO_TARGET_DIR=$(or $(CARGO_TARGET_DIR),target)/loom \
		cargo test -p rtvirtio-dataplane -p rtvirtio-completion --lib --release --locked model

fuzz: ## Fuzz rings, in-flight regions, vhost-user messages, the control API, specifications, learned models and QEMU's replies, FUZZ_SECONDS (60) each
	@scripts/fuzz specification
	@scripts/fuzz learned
	@scripts/fuzz replies
	@scripts/fuzz ring
	@scripts/fuzz vhost_user
	@scripts/fuzz inflight
	@scripts/fuzz control

# The first repetition has every scheme, interleaved; the others repeat two of them.
# All of these continue where they were interrupted. 21 s is the least window that judges p99.9
# of 500 requests a second.
bench-strict: build ## 8 cases, strict targets, background writer; then the sweep of its cap
	$(RTVIRTIO) bench --cases strict8 --schemes $(SCHEMES) --tier strict --neighbour writer \
		--ssd ref-4x250 --repetitions 1 --out $(RESULTS)/strict
	$(RTVIRTIO) bench --cases strict8 --schemes $(REPEATED) --tier strict --neighbour writer \
		--ssd ref-4x250 --repetitions $(REPETITIONS) --out $(RESULTS)/strict
	$(RTVIRTIO) bench --sweep-cap $(SWEEP) --cases strict8 --tier strict --neighbour writer \
		--ssd ref-4x250 --repetitions 1 --profile $(RESULTS)/strict/profile.json \
		--out $(RESULTS)/strict-sweep

# The largest that passes is what counts; `make bench-strict SWEEP=5,10,15,20,30,40` for all.
SWEEP ?= 20,30,40

bench-ssd: build ## 4 cases on a faster disk and on one that stalls
	$(RTVIRTIO) bench --cases $(SSD_CASES) --schemes bfq,hand,rtvirtio --tier strict \
		--neighbour writer --ssd ref-8x80 --repetitions 1 --out $(RESULTS)/ref-8x80
	$(RTVIRTIO) bench --cases $(SSD_CASES) --schemes hand,rtvirtio --tier strict \
		--neighbour writer --ssd ref-stall --repetitions 1 --out $(RESULTS)/ref-stall

SSD_CASES := 1xH,2xM+H,3xL+M+H,4xL+M+H

# Its other half is every cell of rtvirtio in bench-strict. 24 s judges p99 of a flooded task.
bench-prediction: build ## Predictions and bounds under settings that the planner would not choose
	$(RTVIRTIO) bench --prediction 26 --window 24 --ssd ref-4x250 --profile $(RESULTS)/strict/profile.json \
		--out $(RESULTS)/prediction

# The simulator was tuned to the first 30 conditions, and to the first 20 of the second set.
CONDITIONS ?= 500
bench-conditions: build ## Conditions of Table II on the kernel's bfq, and simulated beside: 70 min; 64 others, twice each: 50 min
	$(RTVIRTIO) bench --conditions 150 --window 20 --ssd ref-4x250 --profile $(RESULTS)/strict/profile.json \
		--out $(RESULTS)/conditions
	$(RTVIRTIO) bench path $(RESULTS)/conditions --from 30 --out $(RESULTS)/conditions/path
	$(RTVIRTIO) bench --conditions 64 --twice-every 1 --seed 2 --window 20 --ssd ref-4x250 \
		--profile $(RESULTS)/strict/profile.json --out $(RESULTS)/conditions-2
	$(RTVIRTIO) bench path $(RESULTS)/conditions-2 --from 20 --out $(RESULTS)/conditions-2/path

bench-full-conditions: build ## The same, 500 conditions, each twice; goes on with what is there: 6 h
	$(RTVIRTIO) bench --conditions $(CONDITIONS) --twice-every 1 --window 20 --ssd ref-4x250 \
		--profile $(RESULTS)/strict/profile.json --out $(RESULTS)/conditions
	$(RTVIRTIO) bench path $(RESULTS)/conditions --from 30 --out $(RESULTS)/conditions/path

bench-closed-loop: build guest ## A background VM starts while `watch --control` runs (guests)
	$(RTVIRTIO) bench --closed-loop --guests qemu --guest-image $(GUEST) --ssd ref-4x250 \
		--out $(RESULTS)/closed-loop

bench-planner: setup ## Time of a plan, 4 to 1,000 VMs
	mkdir -p $(RESULTS)
	cargo bench -p rtvirtio-planner --locked | tee $(RESULTS)/planner.txt

bench-iothreads: build ## One guest with 4 queues: 1 IOThread against a mapping over 2 (root)
	@scripts/guest $(GUEST)
	mkdir -p $(RESULTS)/iothreads
	$(RTVIRTIO) bench iothreads --guest-image $(GUEST) --out $(RESULTS)/iothreads | \
		tee $(RESULTS)/iothreads/table.txt

bench-dataplane: build ## rtvirtio serve beside qemu-storage-daemon; then 1 against 2 IOThreads
	@scripts/guest $(GUEST)
	mkdir -p $(RESULTS)/dataplane
	$(RTVIRTIO) bench dataplane --repetitions $(REPETITIONS) --out $(RESULTS)/dataplane
	$(RTVIRTIO) bench dataplane --scaling --server ours --repetitions $(REPETITIONS) \
		--out $(RESULTS)/dataplane-scaling

# The kernel path's results on the same disk, shown beside.
BESIDE := $(if $(wildcard $(RESULTS)/strict/cells.jsonl),--beside $(RESULTS)/strict)

bench-qos: build ## The data plane's schedule: 8 cases beside a deep writer, with and without (root)
	$(RTVIRTIO) bench qos --schemes none,qos --repetitions 1 $(BESIDE) --out $(RESULTS)/qos
	$(RTVIRTIO) bench qos --schemes qos --repetitions $(REPETITIONS) $(BESIDE) --out $(RESULTS)/qos
	cargo bench -p rtvirtio-qos --locked | tee $(RESULTS)/qos/decision.txt

NEIGHBOURS := deep-writer,deep-reader,large-writer,flush-storm,burst,liar

bench-qos-neighbours: build ## The fullest case beside every neighbour, and QEMU's throttling (root)
	@scripts/guest $(GUEST)
	$(RTVIRTIO) bench qos --cases 4xL+M+H --neighbours $(NEIGHBOURS) --schemes none,qos,throttle \
		--repetitions $(REPETITIONS) --out $(RESULTS)/qos-neighbours

# On the disk of the machine: 1.25 GiB of this directory's.
QOS_FILE ?= /var/tmp

bench-qos-file: build ## 4 cases on a file of the machine's disk, with its noise (root)
	$(RTVIRTIO) bench qos --cases 1xL,2xM+H,3xL+M+H,4xL+M+H --schemes none,qos \
		--on file:$(QOS_FILE) --repetitions $(REPETITIONS) --out $(RESULTS)/qos-file

bench-full-qos: build ## The 24 cases × 2 tiers × 6 neighbours on the data plane: 17 h (root)
	@scripts/guest $(GUEST)
	$(RTVIRTIO) bench qos --cases all --tiers strict,paper --neighbours $(NEIGHBOURS) \
		--schemes none,qos,throttle --repetitions $(REPETITIONS) $(BESIDE) --out $(RESULTS)/full-qos

bench-qos-cost: build ## What a schedule costs: 8 backlogged VMs on disks in memory, with it and without
	$(RTVIRTIO) bench qos-cost --out $(RESULTS)/qos-cost

bench-qos-changes: build ## A VM appears, a writer starts, the device slows down: time to targets met (root)
	$(RTVIRTIO) bench qos-changes --repetitions $(REPETITIONS) --out $(RESULTS)/qos-changes

bench-qos-admission: build ## 60 random sets of VMs, run whatever the admission test says (root)
	$(RTVIRTIO) bench qos-admission --out $(RESULTS)/qos-admission

# Where the file is made that is read: 512 MiB.
COMPLETION_DISK ?= /var/tmp

bench-completion: build ## How threads learn that I/O has ended: the acceptance's cells, 30 min
	$(RTVIRTIO) bench completion --repetitions $(REPETITIONS) --directory $(COMPLETION_DISK) \
		--out $(RESULTS)/completion
	$(RTVIRTIO) bench completion --live --repetitions $(REPETITIONS) --out $(RESULTS)/completion

bench-full-completion: build ## The same, every mode, target, T and C: 90 min
	$(RTVIRTIO) bench completion --full --repetitions $(REPETITIONS) --directory $(COMPLETION_DISK) \
		--out $(RESULTS)/full-completion

bench-dataplane-profile: build ## Where the time goes in cases that are not won (root, perf)
	scripts/dataplane-profile $(RTVIRTIO) > $(RESULTS)/dataplane/profile.txt

bench-dataplane-isolation: setup ## A broken VM beside another one on the same IOThread
	mkdir -p $(RESULTS)
	RTVIRTIO_ISOLATION=$(abspath $(RESULTS))/dataplane-isolation.txt cargo test -p rtvirtio --release \
		--locked --test it -- isolation --nocapture

bench-hostile-neighbours: setup ## What a front end that means harm costs another VM: 4 min
	mkdir -p $(RESULTS)/hostile-neighbours
	RTVIRTIO_NEIGHBOURS=$(abspath $(RESULTS))/hostile-neighbours/table.txt cargo test -p rtvirtio --release \
		--locked --test it -- neighbours --nocapture --test-threads 1

bench-db: build ## RocksDB's db_bench with and without `rtvirtio run`, 1 and 32 threads: 4 min (root)
	scripts/db-bench $(RTVIRTIO) | tee $(RESULTS)/db-bench.txt

bench-dataplane-verify: build ## What serve acknowledged is there: load, 100 disconnects, 50 kills
	scripts/dataplane-verify $(RTVIRTIO) > $(RESULTS)/dataplane-verify.txt

bench-dataplane-moves: build ## >= 1,000 live moves of queues a second, under loads that are checked
	{ echo "$$(uname -sr), $$(nproc) CPUs, $$(date -u +%FT%TZ)"; \
		$(RTVIRTIO) bench dataplane moves; } > $(RESULTS)/dataplane-moves.txt

bench-dataplane-footprint: build ## Start, memory and idle CPU with 1 to 256 disks
	mkdir -p $(RESULTS)
	$(RTVIRTIO) bench dataplane footprint | tee $(RESULTS)/dataplane-footprint.txt

bench-monitor: build ## What the monitor takes of a core at 64 queues, idle and beside a full disk
	mkdir -p $(RESULTS)
	scripts/monitor-cost $(RTVIRTIO) | tee $(RESULTS)/monitor.txt

bench-dataplane-syscalls: build ## System calls of an IOThread for each request (root, strace)
	mkdir -p $(RESULTS)
	scripts/dataplane-syscalls $(RTVIRTIO) | tee $(RESULTS)/dataplane-syscalls.txt

# ENDURANCE names tests, such as dataplane::crash. The record has a line for each that passed.
ENDURANCE ?= dataplane::

bench-dataplane-endurance: setup guest libvirt uml ## Real guests: 200 kills, 20 reboots, 10 migrations, ... (root)
	mkdir -p $(RESULTS)
	RTVIRTIO_ENDURANCE=$(abspath $(RESULTS))/dataplane-endurance.txt cargo test -p rtvirtio --release --locked \
		--test it -- $(ENDURANCE) --nocapture --test-threads=1

# The campaign whose results are there; another seed is another one and wants other RESULTS.
IOCORES_SEED ?= 20261361
IOCORES := $(RTVIRTIO) bench iocores --first-seed $(IOCORES_SEED) --compare-simulator

bench-iocores: build ## Policies of I/O cores, 9 phases of 20 s, 3 seeds; the simulator beside: 70 min
	$(IOCORES) --out $(RESULTS)/iocores

# The second repetition shows how far two real runs differ.
bench-full-iocores: bench-iocores ## The same twice, on emulated SSDs, and disturbed: 3.5 h
	$(IOCORES) --repetitions 2 --out $(RESULTS)/iocores
	$(IOCORES) --disk ref-8x80 --out $(RESULTS)/iocores-ssd
	$(RTVIRTIO) bench iocores --disturb --out $(RESULTS)/iocores-disturbed

TIER ?= strict
NEIGHBOUR ?= writer

bench-full: bench-full-24 bench-full-raw ## Both of the following: many hours

bench-full-24: build ## The 24 cases (TIER=strict|paper NEIGHBOUR=writer|none)
	$(RTVIRTIO) bench --cases all --schemes $(SCHEMES) --tier $(TIER) --neighbour $(NEIGHBOUR) \
		--ssd ref-4x250 --repetitions $(REPETITIONS) --out $(RESULTS)/full-$(TIER)-$(NEIGHBOUR)

bench-full-raw: build ## The 8 cases on a loop device over a plain file, with its noise floor
	$(RTVIRTIO) bench --raw --cases strict8 --schemes $(SCHEMES) --tier $(TIER) \
		--neighbour $(NEIGHBOUR) --repetitions $(REPETITIONS) --out $(RESULTS)/full-raw
