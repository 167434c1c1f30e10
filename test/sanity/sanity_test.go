// Package sanity runs csi-sanity against the real binary: TestSanity, for each kind of volume.
package sanity

import (
	"encoding/xml"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// notOffered names the optional parts of CSI that the plugin does not
// advertise: only their specs may be skipped.
var notOffered = []string{
	"Snapshot", "snapshot", "ControllerPublishVolume", "ControllerUnpublishVolume",
	"ExpandVolume [Controller Server]", "ModifyVolume", "source volume", "volume source volume", "volume attribute class",
	"ListVolumeHealth", "GetVolumeHealth [Controller Server]", "VolumeGroup", "GroupController",
	"volume lifecycle",                       // needs ControllerPublishVolume
	"pagination should detect volumes added", // switched off by csi-sanity itself; controllerserver tests it
}

type report struct {
	Suites []struct {
		Cases []struct {
			Name    string `xml:"name,attr"`
			Status  string `xml:"status,attr"`
			Skipped *struct {
				Message string `xml:"message,attr"`
			} `xml:"skipped"`
		} `xml:"testcase"`
	} `xml:"testsuite"`
}

func TestMain(m *testing.M) { harness.Main(m) }

func TestSanity(t *testing.T) {
	for _, access := range []string{"mount", "block"} {
		for _, provisioning := range []string{"thick", "thin"} {
			t.Run(access+" "+provisioning, func(t *testing.T) { run(t, access, provisioning) })
		}
	}
}

func run(t *testing.T, access, provisioning string) {
	p := harness.Start(t, harness.Options{})
	dir := t.TempDir()
	parameters := filepath.Join(dir, "parameters.yaml")
	require.NoError(t, os.WriteFile(parameters, []byte("provisioning: "+provisioning+"\n"), 0o600))
	results := filepath.Join(dir, "junit.xml")
	out, err := exec.Command(harness.SanityBinary(t),
		"-csi.endpoint", "unix://"+p.Socket, "-csi.stagingdir", filepath.Join(p.KubeletDir, "staging"), "-csi.mountdir", filepath.Join(p.KubeletDir, "mount"),
		"-csi.testvolumeaccesstype", access, "-csi.testvolumeparameters", parameters,
		"-csi.testvolumesize", "67108864", "-csi.testvolumeexpandsize", "100663296",
		"-ginkgo.junit-report", results).CombinedOutput()
	if err != nil {
		t.Fatalf("csi-sanity: %v\n%s", err, out)
	}
	data, err := os.ReadFile(results)
	require.NoError(t, err)
	var r report
	require.NoError(t, xml.Unmarshal(data, &r))
	ran, skipped := 0, 0
	for _, suite := range r.Suites {
		for _, c := range suite.Cases {
			if c.Skipped == nil && c.Status != "skipped" {
				ran++
				continue
			}
			skipped++
			if !offered(c.Name) {
				continue
			}
			t.Errorf("skipped, though advertised: %s", c.Name)
		}
	}
	t.Logf("csi-sanity %s %s: %d specs ran, %d skipped", access, provisioning, ran, skipped)
	if ran < 48 {
		t.Errorf("only %d specs ran:\n%s", ran, out)
	}
}

func offered(spec string) bool {
	for _, part := range notOffered {
		if strings.Contains(spec, part) {
			return false
		}
	}
	return true
}
