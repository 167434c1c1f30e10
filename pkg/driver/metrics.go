package driver

import (
	"context"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// metrics is what the plugin counts. No label holds a volume, a path or any
// other value without bound.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	steps    *prometheus.HistogramVec
	backOffs prometheus.Counter
	repairs  *prometheus.CounterVec
	retired  prometheus.Counter
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

// watch adds the volumes by state, which are counted when they are asked for.
func (m *metrics) watch(r *reconciler.Reconciler) {
	m.registry.MustRegister(&volumesByState{
		reconciler: r,
		desc:       prometheus.NewDesc("csi_node_volumes", "Volumes with an intent on this node, by the worst state among their parts.", []string{"state"}, nil),
	})
}

type volumesByState struct {
	reconciler *reconciler.Reconciler
	desc       *prometheus.Desc
}

func (c *volumesByState) Describe(descs chan<- *prometheus.Desc) { descs <- c.desc }

func (c *volumesByState) Collect(out chan<- prometheus.Metric) {
	count := map[reconciler.Condition]int{}
	for _, s := range c.reconciler.Status() {
		count[s.Worst()]++
	}
	for _, condition := range reconciler.Conditions() {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(count[condition]), string(condition))
	}
}
