package driver

import (
	"context"
	"path"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices/pool"
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
	orphans  prometheus.Gauge
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
		orphans: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "csi_node_orphans", Help: "Devices and mounts of the plugin's making that no intent explained when they were last looked for: at the start, and by `csi-node orphans`.",
		}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "csi_node_build_info", Help: "Always 1; the version is in the label.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.registry.MustRegister(m.calls, m.steps, m.backOffs, m.repairs, m.retired, m.orphans, build,
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

// watchRegistration adds whether kubelet has registered the plugin.
func (m *metrics) watchRegistration(registered func() bool) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "csi_node_registered", Help: "1 if kubelet has registered the plugin, which serves its own registration (--registration-dir).",
	}, func() float64 {
		if registered() {
			return 1
		}
		return 0
	}))
}

// watchPool adds what the pool has, which count tells. It may hang.
func (m *metrics) watchPool(count func() (pool.Capacity, error)) {
	m.registry.MustRegister(newPoolUse(count))
}

// poolWait is how long a scrape waits for the pool to be counted. After that it
// shows what was counted last, with the time of that.
const poolWait = 2 * time.Second

// poolUse shows how the pool is used. At most one count is under way at a time,
// so that scrapes of a pool whose disk hangs do not pile up.
type poolUse struct {
	count func() (pool.Capacity, error)

	mu      sync.Mutex
	counted chan struct{} // is closed at the end of the count under way; nil: there is none
	last    pool.Capacity
	seen    time.Time // when last was counted; zero: never
}

func newPoolUse(count func() (pool.Capacity, error)) *poolUse { return &poolUse{count: count} }

// poolGauge is a value of the pool.
type poolGauge struct {
	desc  *prometheus.Desc
	value func(pool.Capacity) int64
}

func newPoolGauge(name, help string, value func(pool.Capacity) int64) poolGauge {
	return poolGauge{prometheus.NewDesc("csi_node_pool_"+name, help, nil, nil), value}
}

var (
	poolGauges = []poolGauge{
		newPoolGauge("size_bytes", "Size of the pool's file system.", func(c pool.Capacity) int64 { return c.Total }),
		newPoolGauge("free_bytes", "What nobody has taken of the pool's file system.", func(c pool.Capacity) int64 { return c.Free }),
		newPoolGauge("available_bytes", "What new volumes and growth can be promised.", func(c pool.Capacity) int64 { return c.Available }),
		newPoolGauge("allocated_bytes", "What volumes have taken.", func(c pool.Capacity) int64 { return c.Allocated }),
		newPoolGauge("promised_bytes", "What volumes were promised and have not taken; more than is free if promises are broken.", func(c pool.Capacity) int64 { return c.Promised }),
		newPoolGauge("owed_bytes", "What volumes may yet take; more than is free if the pool is overcommitted.", func(c pool.Capacity) int64 { return c.Owed }),
	}
	poolVolumes = prometheus.NewDesc("csi_node_pool_volumes", "Volumes of the pool; the provisioning of one with damaged metadata is unknown.", []string{"provisioning"}, nil)
	poolSeen    = prometheus.NewDesc("csi_node_pool_seen_timestamp_seconds", "When the pool was last counted; the pool hangs or is away if that is long ago.", nil, nil)
)

func (p *poolUse) Describe(descs chan<- *prometheus.Desc) {
	for _, g := range poolGauges {
		descs <- g.desc
	}
	descs <- poolVolumes
	descs <- poolSeen
}

func (p *poolUse) Collect(out chan<- prometheus.Metric) {
	c, seen := p.look()
	if seen.IsZero() {
		return
	}
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for _, g := range poolGauges {
		gauge(g.desc, float64(g.value(c)))
	}
	gauge(poolVolumes, float64(c.Thick), string(pool.Thick))
	gauge(poolVolumes, float64(c.Thin), string(pool.Thin))
	gauge(poolVolumes, float64(c.Damaged), "unknown")
	gauge(poolSeen, float64(seen.UnixMilli())/1000)
}

// look waits for a count, but not for long, and returns the last one that ended.
func (p *poolUse) look() (pool.Capacity, time.Time) {
	timer := time.NewTimer(poolWait)
	defer timer.Stop()
	select {
	case <-p.start():
	case <-timer.C:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.seen
}

// start starts a count if none is under way, and returns what its end closes.
func (p *poolUse) start() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.counted != nil {
		return p.counted
	}
	counted := make(chan struct{})
	p.counted = counted
	go func() {
		defer close(counted)
		c, err := p.count()
		if err != nil {
			klog.Background().Error(err, "Cannot count the pool's room for the metrics")
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.counted = nil
		if err == nil {
			p.last, p.seen = c, time.Now()
		}
	}()
	return counted
}
