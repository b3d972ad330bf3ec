# SPDX-License-Identifier: GPL-2.0-only
# What there is to do with Cohort. Each target sets up what it needs itself; `make help` lists them.

SHELL := /bin/bash
CARGO ?= cargo
LAB := target/release/lab
CASE ?= spin2
MINUTES ?= 30
C_FILES := $(wildcard bpf/*.c bpf/*.h bpf/policy/*.h lab/guest/*.c lab/guest/*.h)

.PHONY: help setup build test soak check demo bench calibrate install clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## install the Debian packages of packages.txt that are missing
	@lab/setup

build: setup ## the program, the lab and the tests
	$(CARGO) build --release --locked --workspace

test: build ## unit tests here, then everything that needs a KVM host, in the lab
	@tests/run

soak: build ## MINUTES=30: VMs come and go all the time, nothing may grow; in the lab
	$(LAB) boot --timeout-s $$((60 * $(MINUTES) + 600)) -- sh -c "COHORT_SOAK_MINUTES=$(MINUTES) cohort-tests soak"

check: setup ## formatting and lints
	$(CARGO) fmt --all --check
	clang-format-19 --dry-run --Werror $(C_FILES)
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings

demo: build ## two VMs on two CPUs, stock and Cohort in turns, live; in the lab
	@$(LAB) boot --dilation 20 --timeout-s 1200 -- lab inside demo

# Real workloads need the guests' image, and longer windows because their operations are longer.
REAL := $(filter redis% dbench% vips% restic%,$(CASE))

# What the observer costs: the stock scheduler with it and without.
OBSERVED := tlb2 spin2 pipe2 busy2 --scheduler watched --window-ms 500

# What each mechanism is worth: many schedulers in one rotation, so shorter windows.
EACH := --each-mechanism --pairs 7 --window-ms 400 --settle-ms 100

BENCHED := $(if $(filter observer,$(CASE)),$(OBSERVED),$(if $(filter each-%,$(CASE)),$(CASE:each-%=%) $(EACH),$(CASE) $(if $(REAL),--window-ms 3000)))

bench: build ## CASE=spin2 (or tlb, pipe, barrier, busy, redis, dbench, vips, restic; observer; each-spin2: without each mechanism; hooks: what BPF programs cost): throughput against the stock scheduler; in the lab. CASE=export: a scrape of 1,000 VMs, here
	@if [ "$(CASE)" = export ]; then exec $(CARGO) bench --locked --quiet -p cohort --bench export; fi; \
	if [ "$(CASE)" = hooks ]; then $(LAB) boot --dilation 20 -- lab inside hooks tlb2 spin2 pipe2 barrier2 && \
		exec $(LAB) boot --count-instructions --cpus 2 -- cohort-tests costs; exit; fi; \
	run=out/bench-$(CASE)-$$(date +%Y%m%dT%H%M%S); mkdir -p out; \
	$(LAB) boot --dilation 20 $(if $(REAL),--timeout-s 3000 --guest-image,--timeout-s 2400) --out $$run \
		-- lab inside bench $(BENCHED); \
	status=$$?; \
	cat $$run/results.jsonl >> out/results.jsonl && echo "all results so far: $(LAB) inside report out/results.jsonl"; \
	exit $$status

calibrate: build ## do the workloads gain from a second CPU in the lab, as they must
	@$(LAB) boot --dilation 20 --timeout-s 3600 -- lab inside calibrate tlb spin barrier busy pipe --pairs 3 --window-ms 500

install: build ## the program, its systemd units, and what Prometheus and Grafana want, below DESTDIR
	install -D -m 755 target/release/cohort $(DESTDIR)/usr/sbin/cohort
	install -D -m 644 deploy/cohort.toml $(DESTDIR)/etc/cohort.toml
	install -D -m 644 -t $(DESTDIR)/lib/systemd/system deploy/cohort.service deploy/cohort-export.service
	install -D -m 644 -t $(DESTDIR)/usr/share/cohort deploy/prometheus/cohort.rules.yml deploy/grafana/cohort.json

clean: ## build output and run folders; the cache in ~/.cache/cohort stays
	$(CARGO) clean
	rm -rf out
