package driver

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
)

func goodConfig() Config {
	return Config{
		Endpoint: "unix:///csi/csi.sock", DriverName: "csi-node.local", NodeID: "node-1",
		StateDir: "/run/csi-node", LibDir: "/var/lib/csi-node", KubeletDir: "/var/lib/kubelet",
	}
}

// testOptions are of a driver with a pool.
func testOptions() Options {
	return Options{Name: "csi-node.local", Program: "csi-node", Version: "v1", Backends: []devices.Kind{pool.Kind()}}
}

func TestConfigValidate(t *testing.T) {
	for title, test := range map[string]struct {
		change func(*Config)
		words  string // of the error; empty: good
	}{
		"good":              {func(*Config) {}, ""},
		"one letter":        {func(c *Config) { c.DriverName = "x" }, ""},
		"63 characters":     {func(c *Config) { c.DriverName = strings.Repeat("x", 63) }, ""},
		"64 characters":     {func(c *Config) { c.DriverName = strings.Repeat("x", 64) }, "--driver-name"},
		"no name":           {func(c *Config) { c.DriverName = "" }, "--driver-name"},
		"name with a slash": {func(c *Config) { c.DriverName = "a/b" }, "--driver-name"},
		"name with a dash":  {func(c *Config) { c.DriverName = "-a" }, "--driver-name"},
		"name with a dot":   {func(c *Config) { c.DriverName = "a." }, "--driver-name"},
		"no node":           {func(c *Config) { c.NodeID = "" }, "--node-id"},
		"a long node":       {func(c *Config) { c.NodeID = strings.Repeat("x", 257) }, "--node-id"},
		"volumes":           {func(c *Config) { c.MaxVolumes = 10 }, ""},
		"volumes below 0":   {func(c *Config) { c.MaxVolumes = -1 }, "--max-volumes-per-node"},
		"traces":            {func(c *Config) { c.TracingEndpoint, c.TracingPerMillion = "localhost:4317", 1_000_000 }, ""},
		"traces by URL":     {func(c *Config) { c.TracingEndpoint = "http://localhost:4317" }, "--tracing-endpoint"},
		"a rate below 0":    {func(c *Config) { c.TracingPerMillion = -1 }, "--tracing-sampling-rate-per-million"},
		"a rate above 100%": {func(c *Config) { c.TracingPerMillion = 1_000_001 }, "--tracing-sampling-rate-per-million"},
		"an HTTP endpoint":  {func(c *Config) { c.HTTPEndpoint = ":9810" }, ""},
		"HTTP without port": {func(c *Config) { c.HTTPEndpoint = "localhost" }, "--http-endpoint"},
		"HTTP of no port":   {func(c *Config) { c.HTTPEndpoint = "localhost:98100" }, "--http-endpoint"},
		"an endpoint":       {func(c *Config) { c.Endpoint = "unix://csi.sock" }, "--endpoint"},
		"no state":          {func(c *Config) { c.StateDir = "" }, "--state-dir"},
		"a long endpoint":   {func(c *Config) { c.Endpoint = "unix:///" + strings.Repeat("x", 107) }, "--endpoint: the path"},
		"a long state":      {func(c *Config) { c.StateDir = "/" + strings.Repeat("x", 96) }, "--state-dir: the path"},
		"long registration": {func(c *Config) { c.RegistrationDir = "/" + strings.Repeat("x", 82) }, "--registration-dir: the path"},
		"longest paths": {func(c *Config) {
			c.Endpoint, c.StateDir = "unix:///"+strings.Repeat("x", 106), "/"+strings.Repeat("x", 94)
		}, ""},
		"relative state":   {func(c *Config) { c.StateDir = "run" }, "--state-dir"},
		"relative kubelet": {func(c *Config) { c.KubeletDir = "./kubelet" }, "--kubelet-dir"},
		"relative lib":     {func(c *Config) { c.LibDir = "lib" }, "--lib-dir"},
	} {
		t.Run(title, func(t *testing.T) {
			c := goodConfig()
			test.change(&c)
			err := c.validate()
			switch {
			case test.words == "" && err != nil:
				t.Error(err)
			case test.words != "" && (err == nil || !strings.Contains(err.Error(), test.words) || strings.Contains(err.Error(), "\n")):
				t.Errorf("the error is %v; it should be one line with %q", err, test.words)
			}
		})
	}
	if err := Run(t.Context(), Config{}, testOptions()); err == nil || !strings.Contains(err.Error(), "--driver-name") {
		t.Errorf("Run with a wrong setup: %v", err)
	}
}
