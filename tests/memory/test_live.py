"""What is alive when: peaks, and kinds that become known later."""

from __future__ import annotations

from rulec.memory.live import KINDS, Timeline


def made(**kinds: int) -> dict[str, int]:
    return {kind: kinds.get(kind, 0) for kind in KINDS}


def test_peaks_are_of_everything_and_of_all_but_activations() -> None:
    line = Timeline()
    line.born(100, "weights")
    early = line.born(1000)
    line.begin()
    first = line.born(50)
    line.died(early)
    gradient = line.born(60)
    line.becomes(gradient, "gradients")
    line.died(first)
    line.died(gradient)
    found = line.account()
    assert found.peak == made(weights=100, activations=1050)
    assert found.beside == made(weights=100, gradients=60, activations=50)
    assert (found.total, found.without_activations, found.gradient) == (1150, 160, 60)
    assert found.most == made(weights=100, gradients=60, activations=1050)


def test_what_is_before_the_beginning_counts_only_where_it_lives_on() -> None:
    line = Timeline()
    line.died(line.born(5000, "temporaries"))
    line.born(10, "state")
    line.begin()
    found = line.account()
    assert found.peak == made(state=10)


def test_what_takes_the_place_of_another_is_not_there_beside_it() -> None:
    for same in (True, False):
        line = Timeline()
        line.begin()
        old = line.born(70)
        new = line.born(70 if same else 80)
        line.died(old, into=new)
        assert line.account().total == (70 if same else 150)


def test_a_gradient_that_is_a_sum_counts_with_its_parts() -> None:
    line = Timeline()
    line.begin()
    parts = [line.born(30), line.born(30)]
    whole = line.born(30)
    for number in (*parts, whole):
        line.becomes(number, "gradients")
    line.joins(whole, 2)
    for number in parts:
        line.died(number)
    assert line.account().gradient == 90
    assert line.account().most["gradients"] == 90


def test_a_sum_that_is_made_in_place_is_one_of_its_parts() -> None:
    line = Timeline()
    line.begin()
    parts = [line.born(30), line.born(30)]
    whole = line.born(30)
    line.died(parts[0], into=whole)
    line.died(parts[1])
    for number in (*parts, whole):
        line.becomes(number, "gradients")
    line.joins(whole, 2)
    found = line.account()
    assert (found.gradient, found.most["gradients"]) == (60, 60)


def test_the_host_is_another_place() -> None:
    line = Timeline()
    line.born(100, "weights")
    line.born(700, "state", on_host=True)
    line.begin()
    line.died(line.born(50, "transfers", on_host=True))
    line.died(line.born(60))
    line.copied(9, down=True)
    line.copied(4, down=True)
    line.copied(5, down=False)
    found = line.account()
    assert found.peak == made(weights=100, activations=60)
    assert found.host == made(state=700, transfers=50)
    assert (found.total, found.host_total, found.down, found.up) == (160, 750, 13, 5)


def test_a_piece_of_another_size_is_the_same_piece() -> None:
    line = Timeline()
    piece = line.born(1000, "weights")
    line.resized(piece, 0)
    line.begin()
    line.resized(piece, 30)
    line.resized(piece, 20)
    line.died(piece)
    line.born(25)
    assert line.account().peak == made(weights=30)
