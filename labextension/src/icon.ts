import { LabIcon } from '@jupyterlab/ui-components';
import svgstr from './icon.svg';

export const meshesIcon = new LabIcon({ name: 'monarch:meshes', svgstr });
