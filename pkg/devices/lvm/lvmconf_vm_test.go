//go:build vm

package lvm

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// What an operator's lvm.conf says of output changes no report, and its test mode does not
// have a change told that is not made.
func TestReportWithAnOperatorsConf(t *testing.T) {
	machine.Kernel(t)
	newGroup(t, "conf", 36*mib)
	b, ctx := newBackend(t, "conf"), t.Context()
	v := create(t, b, "volume", 4*mib, nil)
	defer func() { require.NoError(t, b.DeleteVolume(ctx, v)) }()
	want, err := b.readReport(ctx, "conf")
	require.NoError(t, err)
	lv := want.volumes["volume"]
	if !b.own(lv) || !lv.tags.unzeroed || !lv.tags.fresh || lv.automatic || len(want.disks) != 1 {
		t.Fatalf("%+v", want)
	}
	conf := func(t *testing.T, setting string) {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "lvm.conf"), []byte(setting+"\n"), 0o600))
		t.Setenv("LVM_SYSTEM_DIR", dir)
	}
	for _, setting := range []string{
		`report{list_item_separator=";"}`, `report{binary_values_as_numeric=1}`, `report{compact_output=1}`, `report{compact_output_cols="pool_lv"}`,
		`report{prefixes=1}`, `report{output_format="json_std"}`, `report{headings=0 aligned=0 columns_as_rows=1 quoted=0 separator=";"}`, `report{buffered=0}`,
		`report{mark_hidden_devices=0 two_word_unknown_device=1}`, `report{lvs_sort_full="-lv_name" segs_sort_full="-lv_uuid" pvs_sort_full="-pv_name"}`,
		`log{report_command_log=1}`, `log{verbose=7}`, `log{prefix="lvm: " command_names=1 silent=1}`, `global{units="H" suffix=0 si_unit_consistency=0}`,
	} {
		t.Run(setting, func(t *testing.T) {
			conf(t, setting)
			got, err := b.readReport(ctx, "conf")
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%+v (%v), want %+v", got, err, want)
			}
			if ids, err := newBackend(t, "conf").ListVolumes(ctx); err != nil || len(ids) != 1 || ids[0] != v.ID {
				t.Errorf("there are the volumes %q (%v)", ids, err)
			}
		})
	}
	t.Run("test", func(t *testing.T) {
		conf(t, "global{test=1}")
		require.NoError(t, b.BeginFormat(ctx, v))
		if d := find(t, newBackend(t, "conf"), v); !d.Formatting {
			t.Errorf("a format was begun, and the mark is not there: %+v", d)
		}
	})
}
