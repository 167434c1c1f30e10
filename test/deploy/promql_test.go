package deploy

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
)

var language = parser.NewParser(parser.Options{})

// database holds series, sorted by their labels, with a sample each minute from a moment on.
type database struct {
	from time.Time
	all  []storage.Series
}

// load reads series in the notation of promtool's tests, one a line, such as `up{job="x"} 1x30 0x10`.
func load(t *testing.T, from time.Time, text string) database {
	t.Helper()
	var all []storage.Series
	for line := range strings.Lines(text) {
		of, values, err := language.ParseSeriesDesc(strings.TrimSpace(line))
		if err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		var samples []chunks.Sample
		for minute, v := range values {
			if !v.Omitted {
				samples = append(samples, sample{from.Add(time.Duration(minute) * time.Minute), v.Value})
			}
		}
		all = append(all, storage.NewListSeries(of, samples))
	}
	slices.SortFunc(all, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return database{from, all}
}

// ask evaluates a query so long after the first samples.
func (d database) ask(t *testing.T, query string, at time.Duration) (promql.Vector, error) {
	t.Helper()
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1_000_000, Timeout: time.Minute, Parser: language})
	defer engine.Close()
	q, err := engine.NewInstantQuery(t.Context(), d, nil, query, d.from.Add(at))
	if err != nil {
		return nil, err
	}
	defer q.Close()
	vector, err := q.Exec(t.Context()).Vector()
	return slices.Clone(vector), err
}

// Querier implements storage.Queryable.
func (d database) Querier(int64, int64) (storage.Querier, error) {
	return &storage.MockQuerier{SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		found := &found{SeriesSet: storage.EmptySeriesSet(), at: -1}
		for _, series := range d.all {
			if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(series.Labels().Get(m.Name)) }) {
				found.series = append(found.series, series)
			}
		}
		return found
	}}, nil
}

// found implements storage.SeriesSet.
type found struct {
	storage.SeriesSet // the rest of an empty one
	series            []storage.Series
	at                int
}

func (f *found) Next() bool         { f.at++; return f.at < len(f.series) }
func (f *found) At() storage.Series { return f.series[f.at] }

// sample implements chunks.Sample.
type sample struct {
	at    time.Time
	value float64
}

func (s sample) T() int64                      { return s.at.UnixMilli() }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.value }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }
