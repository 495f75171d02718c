# `make demo` and `make test` are all you need; both make .venv first. Another Python: PYTHON=python3.12 make test
PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
TOO_OLD := "regtopk needs Python 3.10 or later, but $(PYTHON) is $(or $(VERSION),missing): try PYTHON=python3.12 make"

# The tests run in two parts side by side. One has all that forks ranks: the process that ranks are forked from takes
# eight seconds to import torch and the rest, so there is one of it.
WITH_RANKS := tests/distributed tests/integrations tests/lab/experiments/ranks tests/lab/plan/test_costs.py \
	tests/lab/test_launch.py tests/slow_network/test_peer_topk.py
KERNELS := tests/kernels tests/slow_network

# Trainers of other frameworks. Where one is not installed, its tests say so and are skipped: `make test`, which is what
# CI runs, has Accelerate and Lightning in one process. transformers and ray take half a gigabyte, and scripts that are
# launched, killed and resumed take minutes: `make test-integrations` installs and runs all, and the slow tests of
# benchmarks. A CI that has the time runs `make test-all` after `make test`, every week say.
LAUNCHED := tests/integrations/test_killed.py
SLOW := tests/kernels/test_compiles.py::test_every_program_compiles \
	tests/slow_network/test_gpt.py::test_the_race \
	tests/slow_network/test_harness.py::test_two_ranks_on_a_slow_link \
	tests/slow_network/test_namespaces.py::test_a_signal_removes_what_was_made \
	tests/slow_network/test_nat.py::test_a_tunnel_changes_no_bit \
	tests/distributed/test_example.py::test_it_trains_on_two_machines \
	tests/distributed/test_failures.py::test_a_killed_rank_comes_back_with_the_same_bits[kills-delay] \
	tests/distributed/test_failures.py::test_a_killed_rank_comes_back_with_the_same_bits[kills-returned] \
	tests/distributed/test_guide.py::test_the_tutorial_prints_what_it_shows

.PHONY: demo docs test test-kernels test-others test-distributed
.PHONY: test-all test-integrations test-flower lint format clean release-check
.DELETE_ON_ERROR:

demo: .venv/.installed
	.venv/bin/regtopk demo --out out/demo --force

# Pages and recorded results are checked first. Warnings of Sphinx are errors: a docstring that reads wrong, for example.
docs: .venv/.docs
	.venv/bin/python -m tools.check_pages
	.venv/bin/python -m tools.check_records
	.venv/bin/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -c docs . out/site
	@echo "the site is in out/site/index.html"

test: .venv/.installed
	$(MAKE) --jobs=3 --keep-going --output-sync=target lint test-distributed test-others

# Ranks give way where all cores are busy: the other part is one process, and would end long after them.
test-distributed: .venv/.compiled
	nice -n 5 .venv/bin/pytest $(WITH_RANKS) $(LAUNCHED:%=--ignore=%) $(SLOW:%=--deselect=%)

# The kernels come first: their conftest.py chooses Triton's interpreter before a program is imported.
test-others: .venv/.compiled
	.venv/bin/pytest $(KERNELS) tests $(WITH_RANKS:%=--ignore=%) $(SLOW:%=--deselect=%)

test-kernels: .venv/.compiled
	.venv/bin/pytest $(KERNELS) $(SLOW:%=--deselect=%)

test-all:
	$(MAKE) --keep-going test-integrations test-flower

test-integrations: .venv/.compiled .venv/.integrations
	.venv/bin/pytest tests/integrations
	.venv/bin/pytest $(SLOW)

# Flower's SuperLink and SuperNodes on loopback; a few minutes, because they start a process for every message.
test-flower: .venv-flower/.installed
	.venv-flower/bin/pytest tests/integrations/test_flower.py

.venv-flower/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/pip install -qq --no-compile "$$(grep '^torch==' constraints-flower.txt)"
	.venv-flower/bin/pip install -qq --no-compile -e '.[experiments,flower]' pytest -c constraints-flower.txt
	@touch $@

# The wheel alone, in empty environments: PYTHONS="python3.12 python3.13" TORCHES="2.11.0 newest" make release-check.
# What this machine lacks is skipped; RELEASE=--strict makes that an error, RELEASE="--tag v0.2.0" also checks the tag.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
TORCHES ?= $(shell sed -n 's/^torch==//p' constraints.txt) 2.11.0 newest
release-check:
	$(PYTHON) -m tools.check_release --pythons $(PYTHONS) --torches $(TORCHES) $(RELEASE)

lint: .venv/.installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: .venv/.installed
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-flower .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist out src/*.egg-info

# torch goes in first and alone: the pinned build, whichever index or wheel folder pip is set up to use.
# Modules are compiled when they are first imported, a third of all that pip would compile. They must be kept then.
unexport PYTHONDONTWRITEBYTECODE
.venv/.installed: .venv/bin/python$(VERSION) pyproject.toml constraints.txt
	.venv/bin/pip install -qq --no-compile --upgrade "$$(grep -o '^pip==[^ ]*' constraints.txt)"
	.venv/bin/pip install -qq --no-compile "$$(grep '^torch==' constraints.txt)"
	.venv/bin/pip install -qq --no-compile -e '.[dev,all]' -c constraints.txt
	@touch $@

.venv/.docs: .venv/.installed
	.venv/bin/pip install -qq --no-compile -e '.[docs]' -c constraints.txt
	@touch $@

.venv/.integrations: .venv/.installed
	.venv/bin/pip install -qq --no-compile -e '.[integrations]' -c constraints.txt
	@touch $@

# Parts that start together would each compile the kernels, and the modules of what they import. This takes a core
# while mypy has the other.
COMPILE := import matplotlib.pyplot, sklearn.datasets, torch._dynamo, torch.distributed.fsdp; \
	from regtopk import kernels; assert kernels.self_check("cpu", 0).failure is None
.venv/.compiled: .venv/.installed $(shell find src/regtopk/kernels -name "*.py")
	.venv/bin/python -c '$(COMPILE)'
	@touch $@

# Absent too when .venv holds another Python, which is then replaced.
.venv/bin/python$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo $(TOO_OLD) >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
