# The one entry, for people and CI alike. `make` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup build guest libvirt uml install uninstall deb demo bench test test-guests test-qos test-blktests test-full python test-python \
	check fmt clippy rustdoc doc deny fuzz loom

# A fresh rustup is not yet on PATH. The shell knows a home directory without HOME too.
export PATH := $(PATH):$(or $(CARGO_HOME),$(shell echo ~/.cargo))/bin

# Binaries are built here whatever a cargo configuration says, because they are run from here.
TARGET := $(or $(CARGO_TARGET_DIR),target)
RTVIRTIO := $(TARGET)/release/rtvirtio
# Those that an operator may install, and the laboratory.
BINARIES := -p rtvirtio -p rtvirtio-run -p rtvirtio-preload -p rtvirtio-tree -p rtvirtio-lab
RESULTS ?= docs/results

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target text; do printf '  make %-18s %s\n' "$$target" "$$text"; done

setup: ## Install what is missing (Debian packages, as root), or say what to install
	@scripts/setup build

build: ## Build the release binaries; installs nothing (make setup does)
	cargo build --release --locked --target-dir $(TARGET) $(BINARIES)

install: ## Install what was built on this system, or below DESTDIR (root)
	@scripts/install "$(DESTDIR)"

uninstall: ## Stop the services, put every knob back and remove what make install has installed (root)
	@scripts/install --uninstall "$(DESTDIR)"

deb: build ## Debian packages in target/deb: rtvirtio, and rtvirtio-lab
	@scripts/deb $(TARGET)/deb

# Where the guests' kernel and initramfs are kept.
GUEST := $(TARGET)/guest

guest: ## Kernel and initramfs for test guests, and QEMU (root)
	@scripts/guest $(GUEST)

# Where the tests' libvirt is kept.
LIBVIRT := $(TARGET)/libvirt

libvirt: ## libvirt 10 or later, and libvirt 12, for tests: unpacked, not installed
	@scripts/libvirt $(LIBVIRT)
	@scripts/libvirt $(LIBVIRT)-12 forky

# Where the tests' User Mode Linux is kept.
UML := $(TARGET)/uml

uml: ## User Mode Linux for tests: unpacked, not installed
	@scripts/uml $(UML)

# Guests are for hosts whose KVM runs them, or for DEMO_FLAGS="--guests qemu".
demo: ## Baselines and rtvirtio side by side on a scratch disk: 3 min after the build (root; DEMO_FLAGS=...)
	@[[ $$EUID -eq 0 ]] || { echo "demo: scratch disks and cgroups need root: make build, then sudo $(RTVIRTIO)-lab demo" >&2; exit 1; }
	@echo "demo: some 10 min on 2 cores with the build, 3 min without"
	@scripts/setup run
	@case "$$(ls /dev/kvm 2>/dev/null) $(DEMO_FLAGS)" in \
		*--guests[=\ ]cgroup*) ;; \
		/dev/kvm*|*--guests[=\ ]qemu*) scripts/guest $(GUEST) || echo "demo: without guests" ;; esac
	cargo build --release --locked --target-dir $(TARGET) -p rtvirtio -p rtvirtio-lab
	$(RTVIRTIO)-lab demo --guest-image $(GUEST) $(DEMO_FLAGS)

bench: ## Run an experiment of lab/experiments: make bench EXPERIMENT=strict; without, list them
	@if [[ -n "$(EXPERIMENT)" ]]; then \
		[[ -x "lab/experiments/$(EXPERIMENT)" ]] || { echo "no experiment $(EXPERIMENT): make bench lists them" >&2; exit 1; }; \
		RESULTS="$(RESULTS)" "lab/experiments/$(EXPERIMENT)"; else \
		for e in lab/experiments/*; do printf '  %-20s %s\n' "$${e##*/}" "$$(sed -n '2s/^# //p' "$$e")"; done; fi

test: setup ## The tests but those that boot guests and Python's: 12 min with the build; what a machine lacks is named
	@echo "test: some 12 min on 2 cores with the build; left to make test-full: guests and the Python package"
	RTVIRTIO_TEST_WITHOUT_GUESTS=1 cargo test --workspace --exclude rtvirtio-py --all-features --locked \
		--no-fail-fast

# The modules of tests/it that boot guests; `make test` names each test that it leaves out.
GUEST_TESTS := cgroup2:: cgroup2_host:: guest:: guest_knobs:: libvirt:: network:: nic:: nvme:: operator:: storage:: systemd:: \
	$(addprefix dataplane::,control crash device ioprio migration qemu uml) real_guest

test-guests: setup ## The tests that boot guests, by QEMU, libvirt and User Mode Linux: 15 min after make test
	@echo "test-guests: some 15 min on 2 cores"
	@scripts/guest $(GUEST) || echo "tests: without guests"
	@scripts/libvirt $(LIBVIRT) || echo "tests: without libvirt"
	@scripts/libvirt $(LIBVIRT)-12 forky || echo "tests: without libvirt 12"
	@scripts/uml $(UML) || echo "tests: without User Mode Linux"
	cargo test --workspace --exclude rtvirtio-py --all-features --locked --no-fail-fast --test it -- $(GUEST_TESTS)

# Suites of others, each in a lane of its own: docs/results has what came of them.
test-qos: setup build guest ## QEMU's own tests of vhost-user-blk (qos-test, from Debian's source package): 8 min at first (root)
	scripts/qos-test $(RTVIRTIO) $(TARGET)/qos-test $(RESULTS)/qos-test

test-blktests: setup build guest ## The kernel's blktests in a guest, on a disk of the data plane: 4 min at first (root)
	scripts/blktests $(RTVIRTIO) $(GUEST) $(TARGET)/blktests $(RESULTS)/blktests

test-full: test test-guests test-python ## All tests: make test, those that boot guests, and the Python package's

# The Python package, its environment and what its tests leave.
PYTHON_DIR := $(abspath $(TARGET)/python)
PYTHON_BIN := "$(PYTHON_DIR)/venv/bin"

python: setup ## The Python package: its wheel, installed in an environment of its own
	@scripts/python "$(PYTHON_DIR)"
	@echo "wheel: $$(ls "$(PYTHON_DIR)"/wheels/*.whl), installed in $(PYTHON_DIR)/venv"

# Exit code 3 of scripts/python: no Python 3.11 or no package index here.
test-python: setup ## The Python package's tests, types, stubs and lints
	@scripts/python "$(PYTHON_DIR)" || { [[ $$? == 3 ]] || exit 1; echo "tests: without Python"; exit 0; }; \
		cd python; set -x; \
		$(PYTHON_BIN)/ruff format --check .; \
		$(PYTHON_BIN)/ruff check .; \
		$(PYTHON_BIN)/mypy rtvirtio tests; \
		cd ..; \
		$(PYTHON_BIN)/python -m mypy.stubtest rtvirtio._core; \
		$(PYTHON_BIN)/pytest -c python/pyproject.toml python/tests

check: setup fmt clippy doc deny fuzz ## All that a change must pass beside the tests

fmt: ## Formatting
	cargo fmt --all --check

clippy: ## Lints, of tests and benchmarks too
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	@scripts/fuzz --check

rustdoc: ## The documentation of the crates, without a warning
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked

doc: rustdoc ## docs/ as a book, and the documentation of the crates
	@scripts/book $(TARGET)

deny: ## Licences, sources and advisories of the dependencies
	@scripts/deny

loom: ## Every interleaving of the models of the live move, and of a completion's slot
	RUSTFLAGS="--cfg rtvirtio_loom" CARGO_TARGET_DIR=$(TARGET)/loom \
		cargo test -p rtvirtio-dataplane -p rtvirtio-completion --lib --release --locked model

fuzz: ## Fuzz frames, rings, in-flight regions, vhost-user messages, the control API, specifications, learned models and QEMU's replies, FUZZ_SECONDS (60) each
	@scripts/fuzz specification
	@scripts/fuzz frames
	@scripts/fuzz learned
	@scripts/fuzz replies
	@scripts/fuzz ring
	@scripts/fuzz vhost_user
	@scripts/fuzz inflight
	@scripts/fuzz control
