"""Quality against speed: places, bands and names that do not run together."""

from __future__ import annotations

from ragspec.pipelines.page.scatter import BASE, LEFT, LETTER, LINE, RIGHT, TOP, Measured, scatter

POINTS = [
    Measured("near@0.02", "near", 1.5, 2.1, 0.7, 3.5),
    Measured("near@0.1", "near", 1.6, 2.2, 0.6, 3.6),
    Measured("aligned", "aligned", 1.52, 2.12, 0.8, 3.6),
    Measured("fewer@4", "fewer", 2.1, 20.0, 18.0, 24.0),
]
COLOURS = {"near": "s0", "aligned": "s1", "fewer": "s2"}


def test_faster_is_further_right_and_nearer_is_lower() -> None:
    made = scatter(POINTS, COLOURS, (1.5, 2.0))
    places = {place.name: place for series in made.series for place in series.places}
    assert list(places) == [point.name for point in POINTS]
    assert places["near@0.02"].x < places["aligned"].x < places["near@0.1"].x < RIGHT
    assert TOP <= places["fewer@4"].y < places["aligned"].y <= BASE
    assert all(p.high < p.y < p.low and LEFT <= p.x <= RIGHT for p in places.values())
    assert places["fewer@4"].tip == "fewer@4: 2.10 times as fast, 20.00 (18.00 to 24.00)"
    near = next(series for series in made.series if series.css == "s0")
    assert near.points.count(",") == 2
    assert made.band is not None and made.band[1] > 0
    assert "1×" in [tick.text for tick in made.ticks]
    assert {"1", "2", "5", "10", "20"} <= {row.text for row in made.rows}


def test_names_do_not_run_together() -> None:
    made = scatter(POINTS, COLOURS, (1.5, 2.0))
    boxes = [
        (x, y - LINE + 2, x + LETTER * len(place.name), y + 2)
        for series in made.series
        for place in series.places
        for x, y in [place.label]
    ]
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
            assert apart
