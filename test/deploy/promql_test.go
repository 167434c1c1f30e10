package deploy

import (
	"fmt"
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

// TestQueriesOfThePage: the queries in docs/metrics.md about full claims find those, and neither one that has room, nor a
// btrfs, which counts no inodes, nor a raw block volume, of which kubelet tells the capacity alone.
func TestQueriesOfThePage(t *testing.T) {
	series := func(claim string, values map[string]string) (text string) {
		for name, value := range values {
			text += fmt.Sprintf("kubelet_volume_stats_%s{namespace=\"default\", persistentvolumeclaim=%q} %s\n", name, claim, value)
		}
		return text
	}
	const hours = "x420" // of 60 minutes, seven
	with := func(changed ...string) map[string]string {
		values := map[string]string{
			"capacity_bytes": "1000" + hours, "used_bytes": "100" + hours, "available_bytes": "900" + hours,
			"inodes": "1000" + hours, "inodes_used": "100" + hours, "inodes_free": "900" + hours,
		}
		for i := 0; i < len(changed); i += 2 {
			values[changed[i]] = changed[i+1] + hours
		}
		return values
	}
	all := load(t, time.Now().Add(-8*time.Hour), strings.TrimSpace(series("well", with())+
		series("full", with("used_bytes", "950", "available_bytes", "50"))+
		series("fills", with("used_bytes", "600+0.1", "available_bytes", "400-0.1"))+
		series("many files", with("inodes_free", "50", "inodes_used", "950"))+
		series("btrfs", with("inodes", "0", "inodes_free", "0", "inodes_used", "0"))+
		series("raw", with("used_bytes", "0", "available_bytes", "0", "inodes", "0", "inodes_free", "0", "inodes_used", "0"))))
	blocks := strings.Split(read(t, "../../docs/metrics.md"), "```promql\n")[1:]
	if len(blocks) != 3 {
		t.Fatalf("docs/metrics.md has %d queries", len(blocks))
	}
	for i, want := range []string{"full", "fills", "many files"} {
		query, _, _ := strings.Cut(blocks[i], "```")
		found, err := all.ask(t, query, 7*time.Hour)
		must(t, err)
		if len(found) != 1 || found[0].Metric.Get("persistentvolumeclaim") != want {
			t.Errorf("%sfinds %v, and not only %q", query, found, want)
		}
	}
}
