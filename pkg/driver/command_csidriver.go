package driver

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/devices"
)

func newCSIDriverCommand(o Options) *cobra.Command {
	name := ""
	cmd := &cobra.Command{
		Use:   "csidriver",
		Short: "Print the CSIDriver object that Kubernetes needs",
		Long: `csidriver prints what Kubernetes needs to know about the driver as a whole, as its
backends declare it: whether volumes are attached by a controller, whether capacity is
tracked, who sets the group of files.`,
		Example: `  csi-node csidriver | kubectl apply -f -`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			properties, err := o.check()
			if err != nil {
				return err
			}
			if err := checkName(name); err != nil {
				return command.WrongUse("--driver-name %w", err)
			}
			return printCSIDriver(cmd.OutOrStdout(), name, properties)
		},
	}
	cmd.Flags().StringVar(&name, "driver-name", o.Name, "name of the CSI driver")
	return cmd
}

// printCSIDriver writes the object as YAML. What does not depend on the backends
// is the engine's: names of pods are for its log, and one mount with a context= is
// how it labels files.
func printCSIDriver(out io.Writer, name string, p devices.Properties) error {
	modes := "Persistent"
	if p.Inline {
		modes += ", Ephemeral"
	}
	_, err := fmt.Fprintf(out, `apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata:
  name: %s
spec:
  attachRequired: %t
  podInfoOnMount: true
  fsGroupPolicy: %s
  seLinuxMount: true
  storageCapacity: %t
  requiresRepublish: false
  volumeLifecycleModes: [%s]
`, name, p.AttachRequired, p.FSGroupPolicy, p.CapacityTracked, modes)
	return err
}
