# SPDX-License-Identifier: GPL-2.0-only
# What there is to do with Cohort. Each target sets up what it needs itself; `make help` lists them.

SHELL := /bin/bash
CARGO ?= cargo
LAB := target/release/lab
CASE ?=
MINUTES ?= 30
C_FILES := $(wildcard bpf/*.c bpf/*.h bpf/policy/*.h lab/guest/*.c lab/guest/*.h)

.PHONY: help setup build test mutants soak check arm demo bench deb install clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## install the Debian packages of packages.txt that are missing
	@lab/setup

build: setup ## the program with its man pages and completions, the lab and the tests
	$(CARGO) build --release --locked --workspace
	target/release/cohort-deploy target/manual

test: deb ## unit tests here, then everything that needs a KVM host, in the lab
	@tests/run

mutants: build ## faults put into the scheduler on purpose: does the test that each names find it? In the lab
	@tests/mutants/run

soak: build ## MINUTES=30: VMs come and go all the time, nothing may grow; in the lab
	$(LAB) boot --quick --timeout-s $$((60 * $(MINUTES) + 600)) -- sh -c "COHORT_SOAK_MINUTES=$(MINUTES) cohort-tests soak"

check: setup ## formatting and lints
	$(CARGO) fmt --all --check
	clang-format-19 --dry-run --Werror $(C_FILES)
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings

arm: setup ## compiles the program for arm64, where its observer is to run; wants rustup's target for it and gcc-aarch64-linux-gnu
	$(CARGO) build --locked --package cohort --lib --target aarch64-unknown-linux-gnu

demo: build ## three VMs on four CPUs, drawn and measured under the stock scheduler and under Cohort; in the lab
	@if [ -t 1 ]; then color=--color; fi; \
	$(LAB) boot --cpus 4 --timeout-s 1200 --out out/demo -- lab inside demo --svg /out/demo.svg $$color && \
	echo "The drawings as a picture: out/demo/demo.svg"

bench: build ## the matrix of lab/matrix.toml: VMs' progress under the stock scheduler and under Cohort; in the lab. CASE=NAME: one cell; CASE=published: the cases of lab/published.toml; CASE=export: a scrape of 1,000 VMs, here
	@case "$(CASE)" in \
	export) exec $(CARGO) bench --locked --quiet -p cohort --bench export ;; \
	published) $(LAB) bench --cells lab/published.toml ;; \
	*) $(LAB) bench $(CASE) ;; \
	esac; status=$$?; \
	case "$(CASE)" in "" | published) $(LAB) report || exit ;; esac; \
	exit $$status

deb: build ## a Debian package of what `make install` installs: target/debian/cohort_*.deb, checked by lintian
	rm -rf target/debian && mkdir -p target/debian
	debian/rules clean binary && debian/rules clean
	lintian --fail-on error,warning --info target/debian/*.deb

install: ## what `make build` has built, below DESTDIR; builds and downloads nothing, and keeps an /etc/cohort.toml that is there
	@[ -x target/release/cohort ] && [ -d target/manual ] || { echo "There is nothing to install yet: run 'make build' first." >&2; exit 1; }
	install -D -m 755 target/release/cohort $(DESTDIR)/usr/sbin/cohort
	[ -e $(DESTDIR)/etc/cohort.toml ] || install -D -m 644 deploy/cohort.toml $(DESTDIR)/etc/cohort.toml
	install -D -m 644 -t $(DESTDIR)/lib/systemd/system deploy/cohort.service deploy/cohort-export.service
	install -D -m 644 deploy/cohort.sysusers $(DESTDIR)/usr/lib/sysusers.d/cohort.conf
	install -D -m 644 -t $(DESTDIR)/usr/share/man/man8 target/manual/man/*.8
	install -D -m 644 target/manual/completions/cohort.bash $(DESTDIR)/usr/share/bash-completion/completions/cohort
	install -D -m 644 -t $(DESTDIR)/usr/share/zsh/vendor-completions target/manual/completions/_cohort
	install -D -m 644 -t $(DESTDIR)/usr/share/fish/vendor_completions.d target/manual/completions/cohort.fish
	install -D -m 644 -t $(DESTDIR)/usr/share/doc/cohort README.md docs/*.md
	install -D -m 644 -t $(DESTDIR)/usr/share/doc/cohort/mechanisms docs/mechanisms/*.md
	install -D -m 644 -t $(DESTDIR)/usr/share/cohort deploy/prometheus/cohort.rules.yml deploy/grafana/cohort.json

clean: ## build output and run folders; the cache in ~/.cache/cohort stays
	$(CARGO) clean
	rm -rf out
