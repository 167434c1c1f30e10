package driver

import (
	"context"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// metrics is what the plugin counts. No label holds a volume, a path or anything else whose
// number is not limited.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	steps    *prometheus.HistogramVec
	backOffs prometheus.Counter
	repairs  *prometheus.CounterVec
	retired  prometheus.Counter
	backends []*backendUse
}

func newMetrics(version string) *metrics {
	// From the cost of a bind mount to kubelet's deadline.
	buckets := prometheus.ExponentialBuckets(0.0001, 4, 12)
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "csi_node_rpc_duration_seconds", Help: "Time from a CSI call to its answer, by method and gRPC code.", Buckets: buckets,
		}, []string{"method", "code"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "csi_node_step_duration_seconds", Help: "Time that the reconciler's steps take, by step and outcome.", Buckets: buckets,
		}, []string{"step", "outcome"}),
		backOffs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "csi_node_backoffs_total", Help: "Passes over a volume that ended with something to try again later.",
		}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "csi_node_repairs_total", Help: "Mounts that were lost, not by the plugin's doing, and that it set out to restore, by part of the volume.",
		}, []string{"part"}),
		retired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "csi_node_retired_publishes_total", Help: "Publishes that were ended because their pod was gone.",
		}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "csi_node_build_info", Help: "Always 1; the version is in the label.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	for _, kind := range []state.PartKind{state.StageKind, state.TargetKind} {
		m.repairs.WithLabelValues(string(kind)) // from 0 on: of a counter that appears Prometheus sees no increase
	}
	m.registry.MustRegister(m.calls, m.steps, m.backOffs, m.repairs, m.retired, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Step implements reconciler.Metrics.
func (m *metrics) Step(action reconciler.Action, took time.Duration, err error) {
	outcome := "done"
	if err != nil {
		outcome = "failed"
	}
	m.steps.WithLabelValues(string(action), outcome).Observe(took.Seconds())
}

// BackOff implements reconciler.Metrics.
func (m *metrics) BackOff() { m.backOffs.Inc() }

// Repair implements reconciler.Metrics.
func (m *metrics) Repair(kind state.PartKind) { m.repairs.WithLabelValues(string(kind)).Inc() }

// Retire implements reconciler.Metrics.
func (m *metrics) Retire() { m.retired.Inc() }

func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	start := time.Now()
	resp, err := handler(ctx, req)
	m.calls.WithLabelValues(path.Base(info.FullMethod), status.Code(err).String()).Observe(time.Since(start).Seconds())
	return resp, err
}

// addVolumes adds the number of volumes by state, and of orphans, which are counted on each scrape.
func (m *metrics) addVolumes(r *reconciler.Reconciler) {
	m.registry.MustRegister(&volumesByState{
		reconciler: r,
		desc:       prometheus.NewDesc("csi_node_volumes", "Volumes with an intent on this node, by the worst state among their parts.", []string{"state"}, nil),
	}, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "csi_node_orphans", Help: "Devices and mounts of the plugin's making that no intent explained when they were last looked for, at the start, by `csi-node orphans`, and, while there are any, by `csi-node status`, and that no call has ended since.",
	}, func() float64 { return float64(r.OrphansLeft(context.Background())) }))
}

type volumesByState struct {
	reconciler *reconciler.Reconciler
	desc       *prometheus.Desc
}

func (c *volumesByState) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

func (c *volumesByState) Collect(out chan<- prometheus.Metric) {
	count := map[report.Condition]int{}
	for _, v := range c.reconciler.Reports() {
		count[v.Worst()]++
	}
	for _, condition := range report.Conditions() {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count[condition]), string(condition))
	}
}

// addRegistration adds whether kubelet has registered the plugin.
func (m *metrics) addRegistration(registered func() bool) {
	m.registry.MustRegister(&truth{registered,
		prometheus.NewDesc("csi_node_registered", "1 if kubelet has registered the plugin, which serves its own registration (--registration-dir).", nil, nil)})
}

// addReadiness adds whether the plugin has all that it needs.
func (m *metrics) addReadiness(n *needs) {
	m.registry.MustRegister(&truth{n.ready,
		prometheus.NewDesc("csi_node_ready", "1 if nothing is missing that the plugin needs: programs, and the storage of the default backend.", nil, nil)})
}

// truth is a gauge that is 1 while something is true, and else 0. It may wait to learn that:
// a scrape asks the collectors at the same time, and functions of gauges one by one.
type truth struct {
	is   func() bool
	desc *prometheus.Desc
}

func (c *truth) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

func (c *truth) Collect(out chan<- prometheus.Metric) {
	value := 0.0
	if c.is() {
		value = 1
	}
	out <- gauge(c.desc, value)
}

// addBackend adds what a backend measures of its storage. measure may hang.
func (m *metrics) addBackend(name string, measure func() ([]devices.Measurement, error)) {
	u := newBackendUse(name, measure)
	m.backends = append(m.backends, u)
	m.registry.MustRegister(u)
}

// places returns what the backends measure, and waits for each for placesWait at most.
func (m *metrics) places() []report.Place {
	var all []report.Place
	for _, u := range m.backends {
		measured, seen := u.look(placesWait)
		if seen.IsZero() {
			continue
		}
		place := report.Place{Backend: u.name, Seen: seen}
		for _, v := range measured {
			place.Values = append(place.Values, report.Value(v))
		}
		all = append(all, place)
	}
	return all
}

// measureWait is how long a scrape waits for the measurement of a backend, and for the
// checks of what the plugin needs. After that it shows the last measurement, with its time.
const measureWait = 2 * time.Second

// backendUse shows how the storage of a backend is used. At most one measurement is
// under way at a time, so that scrapes do not pile up while a disk hangs.
type backendUse struct {
	name    string
	measure func() ([]devices.Measurement, error)

	measurements hang.Calls[struct{}]

	mu   sync.Mutex
	last []devices.Measurement
	seen time.Time // when last was measured; zero: never

	since time.Time // when this began
}

func newBackendUse(name string, measure func() ([]devices.Measurement, error)) *backendUse {
	return &backendUse{name: name, measure: measure, since: time.Now()}
}

// Describe describes nothing: only the backend knows which values there are.
func (u *backendUse) Describe(chan<- *prometheus.Desc) {}

func (u *backendUse) Collect(out chan<- prometheus.Metric) {
	all, seen := u.look(measureWait)
	if seen.IsZero() {
		seen = u.since // so that the alert fires for what was away from the beginning
	}
	prefix := "csi_node_" + strings.ReplaceAll(u.name, "-", "_") + "_"
	for _, m := range all {
		out <- gauge(prometheus.NewDesc(prefix+m.Name, m.Help, nil, m.Labels), m.Value)
	}
	out <- gauge(prometheus.NewDesc(prefix+"seen_timestamp_seconds", "When the "+u.name+" was last counted, or the plugin started; it hangs or is away if that is long ago.", nil, nil),
		float64(seen.UnixMilli())/1000)
}

// gauge returns a value, or an error that the gatherer reports.
func gauge(desc *prometheus.Desc, value float64) prometheus.Metric {
	m, err := prometheus.NewConstMetric(desc, prometheus.GaugeValue, value)
	if err != nil {
		return prometheus.NewInvalidMetric(desc, err)
	}
	return m
}

// look waits for a measurement, for so long at most, and returns the last one that
// ended.
func (u *backendUse) look(wait time.Duration) ([]devices.Measurement, time.Time) {
	ctx, stop := context.WithTimeout(context.Background(), wait)
	defer stop()
	_, _, _ = u.measurements.Join(ctx, "", hang.NoLimit, func() (struct{}, error) { // what ended later is shown by the next scrape
		u.remember()
		return struct{}{}, nil
	})
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.last, u.seen
}

// remember makes a measurement and keeps the result, however late it comes. An incomplete
// result leaves the time of the last complete one as it is, so that the alert fires.
func (u *backendUse) remember() {
	all, err := u.measure()
	u.mu.Lock()
	defer u.mu.Unlock()
	if err == nil {
		u.seen = time.Now()
	} else {
		klog.Background().Error(err, "Cannot measure a backend for the metrics", "backend", u.name)
	}
	if err == nil || len(all) > 0 {
		u.last = all
	}
}
